"""Export of a trace of any device as a CUDA allocator snapshot, which https://pytorch.org/memory_viz draws.

The snapshot holds plain types only, because some programs unpickle it without importing anything.
"""

from __future__ import annotations

from typing import Any

from memlog.trace import encoding
from memlog.trace.records import RecordedTrace
from memlog.trace.result import with_parents

_FIRST_ADDRESS = 0x7F0000000000
_ALIGNMENT = 512
_NS_PER_US = 1000


def snapshot(trace: RecordedTrace) -> dict[str, Any]:
    """Build a snapshot with one device and the trace's history. The addresses of storages are invented."""
    started = trace.result.started_us
    history: list[dict[str, Any]] = []
    entries: dict[int, dict[str, Any]] = {}
    address = _FIRST_ADDRESS
    for event in encoding.decode(trace.events):
        if event.kind == encoding.ALLOC:
            before = event.phase == encoding.BEFORE
            entry = {
                "action": "alloc",
                "addr": address,
                "size": event.size,
                "stream": 0,
                "time_us": started + (0 if before else event.time_ns // _NS_PER_US),
                "frames": _frames(trace, event),
            }
            address += -(-event.size // _ALIGNMENT) * _ALIGNMENT
            entries[event.key] = entry
            history.append(entry)
        elif event.kind == encoding.FREE and event.key in entries:
            freed = entries.pop(event.key)
            at = started + event.time_ns // _NS_PER_US
            history += [
                {**freed, "action": action, "time_us": at}
                for action in ("free_requested", "free_completed")
            ]
    # Storages from before the trace belong at the beginning, even if their ALLOC comes later.
    history.sort(key=lambda entry: entry["time_us"])
    return {
        "segments": [],
        "device_traces": [history],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _frames(trace: RecordedTrace, event: encoding.StreamEvent) -> list[dict[str, Any]]:
    """Return frames for the event's layer, for the layer's parents and for the phase, innermost first."""
    path = with_parents(trace.paths[event.layer], trace.paths)
    names = (*reversed(path), encoding.PHASES[event.phase])
    return [{"name": name, "filename": "memlog", "line": 0} for name in names]
