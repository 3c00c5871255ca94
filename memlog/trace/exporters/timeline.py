"""Export of a trace as the tracer that memlog replaces did: ``events``, ``layer_stats`` and ``summary``."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from memlog.trace.records import RecordedTrace
from memlog.trace.timeline import layer_stats, replay


def timeline(trace: RecordedTrace) -> dict[str, Any]:
    """Build the document. ``summary`` holds every field of the result except ``layers``, a key of its own."""
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
