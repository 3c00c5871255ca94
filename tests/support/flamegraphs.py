"""Small speedscope files, as decoded documents."""

from typing import Any

from support.speedscope import SCHEMA


def sampled() -> dict[str, Any]:
    """Live bytes of three layers."""
    return {
        "type": "sampled",
        "name": "live bytes at the peak",
        "unit": "bytes",
        "startValue": 0,
        "endValue": 7 * 2**20,
        "samples": [[0, 1, 3], [0, 2, 3], [0, 2, 4]],
        "weights": [2**20, 2 * 2**20, 4 * 2**20],
    }


def evented() -> dict[str, Any]:
    """Times of the model, 10 ms, and of its attention layer inside them, 3 ms."""
    return {
        "type": "evented",
        "name": "time",
        "unit": "milliseconds",
        "startValue": 0,
        "endValue": 10,
        "events": [
            {"type": "O", "frame": 0, "at": 0},
            {"type": "O", "frame": 1, "at": 1},
            {"type": "C", "frame": 1, "at": 4},
            {"type": "C", "frame": 0, "at": 10},
        ],
    }


def document(*profiles: dict[str, Any]) -> dict[str, Any]:
    """Return a whole file with these profiles, by default with those of `sampled` and `evented`."""
    names = ["model", "encoder.attention", "encoder.mlp", "[parameters]", "[activations]"]
    return {
        "$schema": SCHEMA,
        "name": "step 100",
        "shared": {"frames": [{"name": name} for name in names]},
        "profiles": list(profiles) or [sampled(), evented()],
        "activeProfileIndex": 0,
        "exporter": "memlog",
    }
