"""The timeline of the tracer that memlog takes over from: ``events``, ``layer_stats``, ``summary``."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from memlog.trace.records import Trace
from memlog.trace.timeline import layer_stats, replay


def timeline(trace: Trace) -> dict[str, Any]:
    """The document. The summary holds every field of the result but the layers, which stand beside it."""
    summary = msgspec.to_builtins(trace.result)
    layers = summary.pop("layers")
    return {
        "events": [dataclasses.asdict(event) for event in replay(trace)],
        "layer_stats": {
            name: dataclasses.asdict(stats) for name, stats in layer_stats(trace.result).items()
        },
        "layers": layers,
        "summary": summary,
    }
