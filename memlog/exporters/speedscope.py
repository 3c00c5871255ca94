"""Flame graphs for https://www.speedscope.app, several profiles in one file.

The page checks little: a negative weight, samples and weights of different length, crossed or backward events
break it; ``endValue`` other than the sum of the weights and one name for two frames are silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from memlog._version import __version__
from memlog.analysis.trace import stream
from memlog.analysis.trace.records import Trace
from memlog.exporters.stacks import Stack, ThreadStacks, path_stack

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

MAX_SAMPLES = 200_000
"""In one file: half a million take the page five seconds and more to load."""

_IN_ORDER_AT_MOST = 100_000
_EVENTED_AT_MOST = 90_000
_THREADS_AT_MOST = 4
_NS_PER_MS = 1e6


def flame_graph(trace: Trace) -> dict[str, Any]:
    """The document: live bytes at the peak, bytes allocated in order, milliseconds."""
    frames = _Frames()
    profiles = [
        _sampled(f"Live bytes at the peak, {trace.result.device}", _at_peak(trace), frames),
        _sampled("Bytes allocated, in order", _in_order(trace), frames),
        *_evented(trace, frames),
    ]
    return {
        "$schema": SCHEMA,
        "name": f"memlog, {trace.paths[1] if len(trace.paths) > 1 else 'no model'}",
        "exporter": f"memlog {__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames.names]},
        "profiles": [profile for profile in profiles if profile is not None],
    }


class _Frames:
    """Numbers for names, each name once."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


def _at_peak(trace: Trace) -> Iterator[tuple[Stack, int]]:
    places = {path: number for number, path in enumerate(trace.paths)}
    for share in sorted(trace.result.shares, key=lambda one: (places[one.path], one.category)):
        yield (*path_stack(share.path, trace.paths), f"[{share.category}]"), share.size


def _in_order(trace: Trace) -> Iterator[tuple[Stack, int]]:
    """Every allocation below its phase; those that are not there one by one together, at the end."""
    said = 0
    for event in stream.decode(trace.events):
        if event.kind == stream.ALLOC and event.phase != stream.BEFORE:
            path = path_stack(trace.paths[event.layer], trace.paths)
            said += event.size
            yield (stream.PHASES[event.phase], *path), event.size
    rest = sum(layer.allocated for layer in trace.result.layers) - said
    if rest > 0:
        yield ("(not kept one by one)",), rest


def _sampled(
    name: str, weighted: Iterable[tuple[Stack, int]], frames: _Frames
) -> dict[str, Any] | None:
    samples: list[list[int]] = []
    weights: list[int] = []
    previous: Stack | None = None
    rest = 0
    for stack, weight in weighted:
        if stack == previous:
            weights[-1] += weight
        elif len(samples) >= _IN_ORDER_AT_MOST:
            rest += weight
        else:
            previous = stack
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


def _evented(trace: Trace, frames: _Frames) -> Iterator[dict[str, Any]]:
    threads: dict[int, _Thread] = {0: _Thread(trace, frames)}
    room = _EVENTED_AT_MOST
    for event in stream.decode(trace.events):
        if event.kind in (stream.ENTER, stream.EXIT, stream.TURN):
            if event.thread not in threads and len(threads) < _THREADS_AT_MOST:
                threads[event.thread] = _Thread(trace, frames)
            if event.thread in threads and room > 0:
                room -= threads[event.thread].take(event)
    for number, thread in threads.items():
        name = "Milliseconds" if number == 0 else f"Milliseconds, thread {number}"
        yield thread.profile(name, cut=room <= 0)


class _Thread:
    """One thread's events, balanced."""

    def __init__(self, trace: Trace, frames: _Frames) -> None:
        self._stacks = ThreadStacks(trace.paths)
        self._frames = frames
        self._duration = trace.result.duration_ms
        self._events: list[dict[str, Any]] = []
        self._open: Stack = ()
        self._at = 0.0
        self._switch(("trace",))

    def take(self, event: stream.TraceEvent) -> int:
        """Opens and closes what an event does; how many entries that took."""
        before = len(self._events)
        stack = self._stacks.after(event)
        if stack is not None:
            self._at = max(self._at, event.time_ns / _NS_PER_MS)
            self._switch(("trace", *stack))
        return len(self._events) - before

    def profile(self, name: str, *, cut: bool) -> dict[str, Any]:
        """Closes everything and gives the profile."""
        self._at = max(self._at, self._duration)
        self._switch(())
        return {
            "type": "evented",
            "name": f"{name} (its beginning)" if cut else name,
            "unit": "milliseconds",
            "startValue": 0,
            "endValue": self._at,
            "events": self._events,
        }

    def _switch(self, stack: Stack) -> None:
        common = 0
        for left, right in zip(self._open, stack, strict=False):
            if left != right:
                break
            common += 1
        for frame in reversed(self._open[common:]):
            self._say("C", frame)
        for frame in stack[common:]:
            self._say("O", frame)
        self._open = stack

    def _say(self, kind: str, frame: str) -> None:
        self._events.append({"type": kind, "frame": self._frames.number(frame), "at": self._at})
