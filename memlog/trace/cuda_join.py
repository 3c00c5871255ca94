"""Joining a device allocator's own history with the layers, without a clock.

Hooks give each change of layer a number and leave it with the allocator, which attaches it to every later
event of that thread. So each allocation names the last change before it, exactly. Where an allocator takes
no such note (XPU), the change is looked up by time, and ties within a microsecond may go wrong.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memlog.trace.encoding import (
    ALLOC,
    BACKWARD,
    BEFORE,
    CLASSIFY,
    ENTER,
    FORWARD,
    FREE,
    OTHER,
    OUTSIDE,
    READING,
    UNDECIDED,
    pack,
)

_BLOCK = 512
"""CUDA's and XPU's allocators round sizes up to this (``kMinBlockSize``)."""

_PREFIX = "ml"


class Mark(NamedTuple):
    """A change that a hook noticed."""

    time_ns: int
    kind: int
    """ENTER, EXIT, TURN, or CLASSIFY."""
    layer: int
    phase: int
    thread: int
    owner: tuple[int, int] = (OUTSIDE, FORWARD)
    """Layer and phase that the thread's work belongs to from here on."""
    address: int = 0
    """Of the storage that a CLASSIFY speaks of."""
    inputs: tuple[int, int] = (0, 0)
    """Addresses of what a module is called with; as the stream has it, of which the serials are told."""
    category: int = UNDECIDED
    reading: tuple[int, int] | None = None
    """Bytes allocated and reserved."""


class Seed(NamedTuple):
    """A storage that was there before the window, unless the history tells of its allocation."""

    address: int
    size: int
    layer: int
    category: int


def label(number: int) -> str:
    """The note that stands for mark ``number``: at most 15 characters, which need no memory of their own."""
    return f"{_PREFIX}{number:x}"


def number_of(note: Any) -> int | None:
    """The mark that a note stands for; ``None`` for one that is not ours."""
    if not isinstance(note, str) or not note.startswith(_PREFIX):
        return None
    try:
        return int(note[len(_PREFIX) :], 16)
    except ValueError:
        return None


def rounded(size: int) -> int:
    """What the allocator makes of a requested size."""
    return -(-size // _BLOCK) * _BLOCK


def _made_in(history: Sequence[Any]) -> set[int]:
    """The addresses of which a history tells first that they are allocated: nothing was there before."""
    first: dict[int, bool] = {}
    for entry in history:
        if entry.get("action") in ("alloc", "free_requested"):
            first.setdefault(entry["addr"], entry["action"] == "alloc")
    return {address for address, made in first.items() if made}


class Join:
    """Makes the one stream of events from a device's history and the marks.

    Args:
        marks: By number.
        seeds: What is known to have been there before.
        opening: Bytes allocated when the window began; ``None``: unknown.
        started_us: Unix time at which it did.
        by_time: The history carries no notes.

    Attributes:
        unattributed: Allocations in the backward pass without a valid note.
    """

    def __init__(
        self,
        marks: Sequence[Mark],
        seeds: Iterable[Seed],
        *,
        opening: int | None,
        started_us: int,
        by_time: bool = False,
    ) -> None:
        self._marks = marks
        self._seeds = list(seeds)
        self._opening = opening
        self._started_us = started_us
        self._times = [mark.time_ns for mark in marks] if by_time else None
        self._live: dict[int, int] = {}
        self._serial = 0
        self._now = 0
        self._said = 0
        self._last_forward = -1
        self.unattributed = 0

    def events(self, history: Sequence[Any]) -> Iterator[bytes]:
        """The stream, packed, an event or some at a time.

        Args:
            history: One device's part of a snapshot's ``device_traces``. Actions that are not known are
                passed over.
        """
        yield from self._before(history)
        for entry in history:
            action = entry.get("action")
            if action == "alloc":
                number = self._number(entry)
                yield from self._changes(-1 if number is None else number)
                yield self._alloc(entry, number)
            elif action == "free_requested":
                yield from self._changes(self._number(entry) or -1)
                yield from self._free(entry)
        yield from self._changes(len(self._marks) - 1)

    def _before(self, history: Sequence[Any]) -> Iterator[bytes]:
        """What was there when the window began: what is known, what was freed later, and the rest."""
        known = 0
        made = _made_in(history)
        for seed in self._seeds:
            if seed.address not in self._live and seed.address not in made:
                yield self._hold(seed.address, seed.size, seed.layer, BEFORE, seed.category)
                known += rounded(seed.size)
        born: set[int] = set()
        for entry in history:
            address = entry.get("addr")
            if entry.get("action") == "alloc":
                born.add(address)
            elif entry.get("action") == "free_requested" and address not in born:
                if address not in self._live:
                    yield self._hold(address, entry["size"], OUTSIDE, BEFORE, OTHER)
                    known += rounded(entry["size"])
                born.add(address)
        if self._opening is not None and self._opening > known:
            yield self._hold(-1, self._opening - known, OUTSIDE, BEFORE, OTHER, exact=True)

    def _number(self, entry: Any) -> int | None:
        if self._times is not None:
            time_ns = (entry.get("time_us", 0) - self._started_us) * 1000
            place = bisect_right(self._times, time_ns) - 1
            return place if place >= 0 else None
        number = number_of(entry.get("user_metadata"))
        return number if number is not None and number < len(self._marks) else None

    def _changes(self, until: int) -> Iterator[bytes]:
        while self._said <= until:
            mark = self._marks[self._said]
            if mark.kind == ENTER and mark.phase == FORWARD and mark.thread == 0:
                self._last_forward = self._said
            self._said += 1
            self._now = max(self._now, mark.time_ns)
            yield from self._change(mark)

    def _change(self, mark: Mark) -> Iterator[bytes]:
        if mark.kind == CLASSIFY:
            serial = self._live.get(mark.address)
            if serial is not None:
                yield pack(
                    serial, 0, self._now, mark.layer, CLASSIFY, 0, mark.category, mark.thread
                )
            return
        if mark.reading is not None:
            allocated, reserved = mark.reading
            yield pack(
                allocated, reserved, self._now, mark.layer, READING, mark.phase, 0, mark.thread
            )
        key, size = (self._live.get(one, 0) if one > 0 else one for one in mark.inputs)
        yield pack(key, size, self._now, mark.layer, mark.kind, mark.phase, 0, mark.thread)

    def _alloc(self, entry: Any, number: int | None) -> bytes:
        self._pass_time(entry)
        thread, (layer, phase) = 0, (OUTSIDE, FORWARD)
        if number is not None:
            mark = self._marks[number]
            thread, (layer, phase) = mark.thread, mark.owner
            if phase == BACKWARD and thread != 0 and number < self._last_forward:
                # A thread of autograd's still carries the note of the backward pass before.
                layer = OUTSIDE
                self.unattributed += 1
        return self._hold(entry["addr"], entry["size"], layer, phase, UNDECIDED, thread=thread)

    def _free(self, entry: Any) -> Iterator[bytes]:
        self._pass_time(entry)
        serial = self._live.pop(entry["addr"], None)
        if serial is not None:
            yield pack(serial, 0, self._now, 0, FREE, 0, 0, 0)

    def _hold(
        self,
        address: int,
        size: int,
        layer: int,
        phase: int,
        category: int,
        *,
        thread: int = 0,
        exact: bool = False,
    ) -> bytes:
        self._serial += 1
        self._live[address] = self._serial
        size = size if exact else rounded(size)
        return pack(self._serial, size, self._now, layer, ALLOC, phase, category, thread)

    def _pass_time(self, entry: Any) -> None:
        time_ns = (entry.get("time_us", 0) - self._started_us) * 1000
        self._now = max(self._now, time_ns)
