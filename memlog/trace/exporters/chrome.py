"""Export of a trace in Chrome's format, with layers as slices and memory as counters.

Perfetto and ``chrome://tracing`` open the file. Format: "Trace Event Format" (Google, 2016). Times are
microseconds since the Unix time in the field ``baseTimeNanoseconds``. This field is an addition of
``torch.profiler`` to the format.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from memlog.errors import ConfigurationError
from memlog.trace import encoding
from memlog.trace.exporters.speedscope import ThreadStacks
from memlog.trace.records import RecordedTrace

MAX_PROFILER_TRACE = 1 << 30
"""Maximum bytes of a profiler's trace after decompression. memlog refuses a larger trace."""

PROCESS = "memlog"
"""Process id of memlog's tracks. It is not a number, so it differs from all process ids of the profiler."""

_MAX_COUNTERS = 100_000
"""Maximum number of counter events in a document."""
_NS_PER_US = 1e3


def chrome_trace(trace: RecordedTrace) -> dict[str, Any]:
    events = [_metadata("process_name", 0, f"memlog: layers and memory ({trace.result.device})")]
    events += _slices(trace)
    events += _counters(trace)
    return {
        "baseTimeNanoseconds": trace.result.started_us * 1000,
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def read_profiler_trace(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a file that ``torch.profiler``'s ``export_chrome_trace`` wrote, compressed or not.

    Raises:
        ConfigurationError: The file is not such a trace, or is larger than `MAX_PROFILER_TRACE`.
    """
    found = Path(path)
    try:
        with gzip.open(found) if found.suffix == ".gz" else found.open("rb") as file:
            content = file.read(MAX_PROFILER_TRACE + 1)
        if len(content) > MAX_PROFILER_TRACE:
            raise ConfigurationError(f"{found} is larger than 1 GiB; profile fewer steps")
        document = msgspec.json.decode(content)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{found} can't be read ({error}); pass a file that export_chrome_trace() wrote"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ConfigurationError(
            f"{found} holds no traceEvents; pass a file that export_chrome_trace() wrote"
        )
    return document


def merged(ours: dict[str, Any], profilers: dict[str, Any]) -> dict[str, Any]:
    """Return the profiler's document with memlog's events added, in the time of the profiler's clock.

    ``ours`` is a document of `chrome_trace`, and ``profilers`` is a document of `read_profiler_trace`.
    """
    shift = (ours["baseTimeNanoseconds"] - profilers.get("baseTimeNanoseconds", 0)) / _NS_PER_US
    moved = [
        {**event, "ts": event["ts"] + shift} if "ts" in event else event
        for event in ours["traceEvents"]
    ]
    return {**profilers, "traceEvents": [*profilers["traceEvents"], *moved]}


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": thread, "args": {"name": value}}


def _slices(trace: RecordedTrace) -> Iterator[dict[str, Any]]:
    threads: dict[int, ThreadStacks] = {}
    last = 0.0
    for event in encoding.decode(trace.events):
        if event.kind not in (encoding.ENTER, encoding.EXIT, encoding.PHASE_CHANGE):
            continue
        if event.thread not in threads:
            threads[event.thread] = ThreadStacks(trace.paths)
            yield _metadata("thread_name", event.thread, f"layers, thread {event.thread}")
        last = event.time_ns / _NS_PER_US
        for opens, name in threads[event.thread].after(event):
            yield _slice(name, last, event.thread, opens=opens)
    end = max(last, trace.result.duration_ms * 1000)
    for number, stacks in threads.items():
        for opens, name in stacks.close():
            yield _slice(name, end, number, opens=opens)


def _slice(name: str, at: float, thread: int, *, opens: bool) -> dict[str, Any]:
    fields = {"pid": PROCESS, "tid": thread, "ts": at}
    if opens:
        return {"ph": "B", "name": name, "cat": "layer", **fields}
    return {"ph": "E", "name": name, **fields}


def _counters(trace: RecordedTrace) -> Iterator[dict[str, Any]]:
    """Yield counter events. A counter has the live bytes that each phase has allocated.

    If a trace has many events, only every n-th event gets a counter.
    """
    every = len(trace.events) // encoding.EVENT_BYTES // _MAX_COUNTERS + 1
    live = dict.fromkeys(encoding.PHASES, 0)
    live["before"] = trace.result.before or 0
    pairs = encoding.decode_with_allocations(trace.events)
    for index, (event, allocation) in enumerate(pairs):
        if event.kind == encoding.ALLOC:
            if event.phase != encoding.BEFORE:
                live[encoding.PHASES[event.phase]] += event.size
        elif event.kind == encoding.FREE and allocation is not None:
            live[encoding.PHASES[allocation.phase]] -= allocation.size
        elif event.kind == encoding.READING:
            live["before"] = event.key
        else:
            continue
        if index % every == 0:
            yield {
                "ph": "C",
                "name": "live bytes",
                "pid": PROCESS,
                "tid": 0,
                "ts": event.time_ns / _NS_PER_US,
                "args": dict(live),
            }
