"""Exports of a trace for speedscope, Chrome's and Perfetto's viewers, and https://pytorch.org/memory_viz.

Speedscope checks little in a file. It fails if a weight is negative, if the number of samples is not the
number of weights, if events close frames in the wrong order, or if events go back in time. It shows wrong
figures without an error if ``endValue`` is not the sum of the weights, or if two frames have the same name.

Perfetto and ``chrome://tracing`` open the file. Format: "Trace Event Format" (Google, 2016). Times are
microseconds since the Unix time in the field ``baseTimeNanoseconds``. This field is an addition of
``torch.profiler`` to the format.

The snapshot holds plain types only, because some programs unpickle it without importing anything.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from memlog._internal.terminal import format_bytes
from memlog._version import __version__
from memlog.errors import ConfigurationError
from memlog.trace import encoding
from memlog.trace.encoding import (
    ENTER,
    EXIT,
    FORWARD,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    StreamEvent,
)
from memlog.trace.records import Exactness, RecordedTrace
from memlog.trace.result import common_length, with_parents

Stack = tuple[str, ...]


class ThreadStacks:
    """Stack of one thread's frames. The thread's events open and close the frames."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._outside: Stack = ()
        """Frames of the thread's work outside modules: a backward pass or an optimizer's step."""
        self._modules: list[tuple[int, int]] = []
        self._open: Stack = ()

    def after(self, event: StreamEvent) -> list[tuple[bool, str]]:
        """Process an ENTER, EXIT or PHASE_CHANGE, and return the frames that the event closes and opens.

        Returns:
            In order: ``(False, frame)`` for a frame that closes, ``(True, frame)`` for a frame that opens.
        """
        if event.kind == ENTER:
            self._modules.append((event.layer, event.phase))
        elif event.kind == EXIT:
            # The end of a call that began before the trace closes nothing.
            if event.layer in (layer for layer, _ in self._modules):
                while self._modules.pop()[0] != event.layer:
                    pass
        else:
            self._outside = ()
            if event.phase != FORWARD:
                known = event.layer != OUTSIDE
                path = with_parents(self._paths[event.layer], self._paths) if known else ()
                self._outside = (PHASES[event.phase], *path)
        return self._switch(tuple(self._stack()))

    def close(self) -> list[tuple[bool, str]]:
        """Close all open frames. Return ``(False, frame)`` for each, the innermost frame first."""
        return self._switch(())

    def _switch(self, stack: Stack) -> list[tuple[bool, str]]:
        common = common_length(self._open, stack)
        closed = [(False, frame) for frame in reversed(self._open[common:])]
        self._open = stack
        return closed + [(True, frame) for frame in stack[common:]]

    def _stack(self) -> Iterator[str]:
        yield from self._outside
        previous: int | None = None
        for layer, phase in self._modules:
            if phase != previous and not (phase == FORWARD and self._outside):
                yield PHASES[RECOMPUTE] if phase == RECOMPUTE else PHASES[FORWARD]
            previous = phase
            yield self._paths[layer]


SCHEMA = "https://www.speedscope.app/file-format-schema.json"

_MAX_SAMPLES = 100_000
"""Maximum number of samples in a profile. Speedscope needs at least five seconds to load 500,000 samples."""
_MAX_FRAMES = 10_000_000
"""Maximum number of frames in all samples of a profile together."""


class Frames:
    """Table of the frames in a file. The table holds each name once."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the frame's position in the table, counted from 0. A new name is added to the table."""
        return self.names.setdefault(name, len(self.names))


def sampled(
    name: str,
    weighted: Iterable[tuple[Stack, int]],
    frames: Frames,
    max_samples: int = _MAX_SAMPLES,
) -> dict[str, Any] | None:
    """Build a profile from stacks (outermost frame first) and their bytes; ``None`` if there are no stacks.

    If there are more than ``max_samples`` samples or ten million frames, the remaining bytes become one
    additional sample. So the sum of all samples is right.
    """
    samples: list[list[int]] = []
    weights: list[int] = []
    previous: Stack | None = None
    rest = depth = 0
    for stack, weight in weighted:
        if stack == previous:
            weights[-1] += weight
        elif len(samples) >= max_samples or depth + len(stack) > _MAX_FRAMES:
            rest += weight
        else:
            previous = stack
            depth += len(stack)
            samples.append([frames.number(frame) for frame in stack])
            weights.append(weight)
    if rest:
        samples.append([frames.number("(more than this file holds)")])
        weights.append(rest)
    if not samples:
        return None
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def speedscope_file(
    name: str,
    frames: Frames,
    profiles: Sequence[dict[str, Any] | None],
    files: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the whole document from the profiles that are not ``None``.

    Speedscope shows the first profile when it opens the file. ``files`` maps names of frames to the names of
    files that Speedscope shows for the frames.
    """
    known = files or {}
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": f"memlog {__version__}",
        "activeProfileIndex": 0,
        "shared": {
            "frames": [
                {"name": name, "file": known[name]} if name in known else {"name": name}
                for name in frames.names
            ]
        },
        "profiles": [profile for profile in profiles if profile is not None],
    }


_MAX_EVENTS = 90_000
_MAX_THREADS = 4
_NS_PER_MS = 1e6
_MARK = "\N{WORD JOINER}"

_BOUNDS: dict[Exactness, str] = {
    "lower bound": "at least ",
    "sampled": "at least ",
    "approximate": "about ",
}


def flame_graph(trace: RecordedTrace, where: str = "") -> dict[str, Any]:
    """Build a document with three kinds of profiles: live bytes at the peak, allocations in order, and time.

    The title contains ``where``, the place of the trace in the run, such as ``step 160``.
    """
    frames, title = Frames(), _title(trace, where)
    at_peak = sampled(title, _at_peak(trace), frames)
    files = _files(trace, list(frames.names))
    profiles = [
        at_peak,
        sampled("Bytes allocated, in order", _in_order(trace), frames),
        *_evented(trace, frames),
    ]
    return speedscope_file(title, frames, profiles, files)


def _title(trace: RecordedTrace, where: str) -> str:
    result = trace.result
    subject = ", ".join(filter(None, [trace.model, where]))
    if result.peak is None:
        return subject or "a trace"
    bound, peak = _BOUNDS.get(result.exactness, ""), format_bytes(result.peak)
    device = "" if result.device == "cpu" else f" on {result.device}"
    return f"{subject or 'no model'}: {bound}{peak}{device} at the peak"


def _files(trace: RecordedTrace, names: Sequence[str]) -> dict[str, str]:
    """Return a "file" for each frame at the peak, by the frame's name. The files make the colours differ.

    Speedscope sorts frames by file and name. A frame's colour depends on the frame's position in this order.
    Without files, the categories would be neighbours with nearly the same colour. So each file's name begins
    with invisible characters. The number of these characters sets the position: categories at equal
    distances, and layers between the categories, in the model's order.
    """
    categories = [f"[{category}]" for category in trace.result.categories]
    kinds = dict(zip(trace.paths, trace.kinds, strict=False))
    layers = [frame for frame in names if frame not in categories]
    files = {frame: f"{_MARK * (2 * place + 1)}category" for place, frame in enumerate(categories)}
    for number, frame in enumerate(layers):
        place = number * len(categories) // len(layers)
        files[frame] = f"{_MARK * (2 * place + 2)}{kinds.get(frame) or 'not a layer'}"
    return files


def _at_peak(trace: RecordedTrace) -> Iterator[tuple[Stack, int]]:
    numbers = {path: number for number, path in enumerate(trace.paths)}
    for share in sorted(trace.result.shares, key=lambda part: (numbers[part.path], part.category)):
        line = (share.line,) if share.line else ()
        yield (*with_parents(share.path, trace.paths), *line, f"[{share.category}]"), share.size


def _in_order(trace: RecordedTrace) -> Iterator[tuple[Stack, int]]:
    """Yield the stack and bytes of each stored allocation, then the sum of all allocations not stored.

    The outermost frame of a stack is the phase.
    """
    stored = 0
    lines = {
        event.key: (trace.lines[event.size - 1],)
        for event in encoding.decode(trace.events)
        if event.kind == encoding.LINE
    }
    for event in encoding.decode(trace.events):
        if event.kind == encoding.ALLOC and event.phase != encoding.BEFORE:
            path = with_parents(trace.paths[event.layer], trace.paths)
            stored += event.size
            yield (encoding.PHASES[event.phase], *path, *lines.get(event.key, ())), event.size
    rest = sum(layer.allocated or 0 for layer in trace.result.layers) - stored
    if rest > 0:
        yield ("(sum of allocations that are not stored one by one)",), rest


def _evented(trace: RecordedTrace, frames: Frames) -> Iterator[dict[str, Any]]:
    threads: dict[int, _Thread] = {0: _Thread(trace, frames)}
    remaining = _MAX_EVENTS
    for event in encoding.decode(trace.events):
        if event.kind in (encoding.ENTER, encoding.EXIT, encoding.PHASE_CHANGE):
            if event.thread not in threads and len(threads) < _MAX_THREADS:
                threads[event.thread] = _Thread(trace, frames)
            if event.thread in threads and remaining > 0:
                remaining -= threads[event.thread].apply(event)
    for number, thread in threads.items():
        name = "Milliseconds" if number == 0 else f"Milliseconds, thread {number}"
        yield thread.profile(name, cut=remaining <= 0)


class _Thread:
    """Profile of the time that one thread spends in each frame. Every opened frame is closed."""

    def __init__(self, trace: RecordedTrace, frames: Frames) -> None:
        self._stacks = ThreadStacks(trace.paths)
        self._frames = frames
        self._duration = trace.result.duration_ms
        self._events: list[dict[str, Any]] = []
        self._at = 0.0
        self._emit([(True, "trace")])

    def apply(self, event: encoding.StreamEvent) -> int:
        """Add an event to the profile. Return the number of entries that were added."""
        # Speedscope fails if events go back in time.
        self._at = max(self._at, event.time_ns / _NS_PER_MS)
        return self._emit(self._stacks.after(event))

    def profile(self, name: str, *, cut: bool) -> dict[str, Any]:
        self._at = max(self._at, self._duration)
        self._emit([*self._stacks.close(), (False, "trace")])
        return {
            "type": "evented",
            "name": f"{name} (its beginning)" if cut else name,
            "unit": "milliseconds",
            "startValue": 0,
            "endValue": self._at,
            "events": self._events,
        }

    def _emit(self, changes: list[tuple[bool, str]]) -> int:
        self._events += [
            {"type": "O" if opens else "C", "frame": self._frames.number(frame), "at": self._at}
            for opens, frame in changes
        ]
        return len(changes)


MAX_PROFILER_TRACE = 1 << 30
"""Maximum bytes of a profiler's trace after decompression. memlog refuses a larger trace."""

PROCESS = "memlog"
"""Process id of memlog's tracks. It is not a number, so it differs from all process ids of the profiler."""

_MAX_COUNTERS = 100_000
"""Maximum number of counter events in a document."""
_NS_PER_US = 1000


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
    source = Path(path)
    try:
        with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as file:
            # One byte more than allowed, to see that the file is too large.
            content = file.read(MAX_PROFILER_TRACE + 1)
        if len(content) > MAX_PROFILER_TRACE:
            raise ConfigurationError(f"{source} is larger than 1 GiB; profile fewer steps")
        document = msgspec.json.decode(content)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{source} can't be read ({error}); pass a file that export_chrome_trace() wrote"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ConfigurationError(
            f"{source} holds no traceEvents; pass a file that export_chrome_trace() wrote"
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


_FIRST_ADDRESS = 0x7F0000000000
_ALIGNMENT = 512


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
