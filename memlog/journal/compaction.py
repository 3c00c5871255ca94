"""Making a closed segment smaller: what is frequent is thinned, what is rare and every peak is kept.

A compacted segment takes the place of the old one at once, so a crash leaves the one or the other, and
who was reading the old one reads it to its end. Where lines are gone a `Gap` stands, which tells how many
and how long they were: positions in the segment mean the same as before, and numbers of events that are
missing there are known to be thinned rather than lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from memlog._internal.safe_files import open_plain, replacing
from memlog.events import SCHEMA_VERSION, Event
from memlog.journal.format import MAX_LINE_BYTES, UNDECODABLE, Compaction, Gap, Header, Record

WHOLE_SEGMENT = 10**9
"""A window that no segment fills."""

Levels: TypeAlias = Callable[[Event], "dict[str, float] | None"]
"""The values of an event whose greatest in a window is kept, by name; ``None``: the event is always kept."""

_HEADER = msgspec.json.Decoder(Header)
_RECORD = msgspec.json.Decoder(Record)
_GAP = msgspec.json.Decoder(Gap)


def compacted_window(path: Path) -> int | None:
    """The window that a segment was compacted with; 0: not yet. ``None``: it can't be."""
    try:
        with open_plain(path.parent, path.name) as file:
            header = _HEADER.decode(file.readline(MAX_LINE_BYTES))
    except (OSError, *UNDECODABLE):
        return None
    if header.schema > SCHEMA_VERSION:
        return None
    return 0 if header.compaction is None else header.compaction.window


def compact(path: Path, window: int, levels: Levels, *, delivered: bool) -> int:
    """Makes a segment that has a successor smaller, and returns how many events are gone.

    Of each ``window`` events of one kind in a row those are kept that hold the greatest of any value, the
    first of equals, and the last one.

    Args:
        path: The segment, whose header can be read.
        window: Number of events.
        levels: Which events may go, and by which values they are judged.
        delivered: Whether every sink has had them.

    Raises:
        OSError: it can't be read or written; it is then as it was.
        ValueError: it holds a line of a length that memlog does not write; likewise.
    """
    kept = _Kept(window, levels)
    with open_plain(path.parent, path.name) as source:
        first_line = source.readline(MAX_LINE_BYTES)
        for index, line in enumerate(_lines(source)):
            kept.take(index, line)
        kept.finish()
        with replacing(path.parent, path.name) as target:
            target.write(_header_line(first_line, window))
            source.seek(len(first_line))
            gone = _copy(source, target, kept.indices, delivered=delivered)
            target.flush()
            os.fsync(target.fileno())
            status = os.fstat(source.fileno())
            # When a run last wrote says whether it lives, and when it died.
            os.utime(target.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return gone


class _Kept:
    """Finds the lines to keep; those that are not records of a frequent kind all are."""

    def __init__(self, window: int, levels: Levels) -> None:
        self.indices: set[int] = set()
        self._window = window
        self._levels = levels
        self._open: dict[type[Event], _Window] = {}

    def take(self, index: int, line: bytes) -> None:
        event = _event(line)
        levels = None if event is None else self._levels(event)
        if event is None or levels is None:
            self.indices.add(index)
            return
        window = self._open.setdefault(type(event), _Window())
        window.take(index, levels)
        if window.events >= self._window:
            self.indices |= self._open.pop(type(event)).kept()

    def finish(self) -> None:
        for window in self._open.values():
            self.indices |= window.kept()


class _Window:
    """Some events of one kind in a row."""

    def __init__(self) -> None:
        self.events = 0
        self._last = 0
        self._greatest: dict[str, tuple[float, int]] = {}

    def take(self, index: int, levels: dict[str, float]) -> None:
        self.events += 1
        self._last = index
        for name, value in levels.items():
            held = self._greatest.get(name)
            if held is None or value > held[0]:
                self._greatest[name] = value, index

    def kept(self) -> set[int]:
        return {self._last, *(index for _, index in self._greatest.values())}


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise ValueError("a line that memlog did not write")
        yield line


def _event(line: bytes) -> Event | None:
    try:
        return _RECORD.decode(line).event
    except UNDECODABLE:
        return None


def _header_line(first_line: bytes, window: int) -> bytes:
    header = _HEADER.decode(first_line)
    begins = len(first_line) if header.compaction is None else header.compaction.begins
    header = msgspec.structs.replace(header, compaction=Compaction(window, begins))
    return msgspec.json.encode(header) + b"\n"


def _copy(source: BinaryIO, target: BinaryIO, kept: set[int], *, delivered: bool) -> int:
    """Copies the lines that are kept, with a gap in place of the others; returns how many events went."""
    gone, gap = 0, Gap(0, 0, 0)
    for index, line in enumerate(_lines(source)):
        earlier = _earlier_gap(line)
        if earlier is not None:
            gap = _joined(gap, earlier)
        elif index in kept:
            _write_gap(target, gap)
            gap = Gap(0, 0, 0)
            target.write(line)
        else:
            gone += 1
            gap = _joined(gap, Gap(1, int(delivered), len(line)))
    _write_gap(target, gap)
    return gone


def _earlier_gap(line: bytes) -> Gap | None:
    try:
        return _GAP.decode(line) if line.startswith(b"{") else None
    except UNDECODABLE:
        return None


def _joined(one: Gap, other: Gap) -> Gap:
    return Gap(one.events + other.events, one.delivered + other.delivered, one.bytes + other.bytes)


def _write_gap(target: BinaryIO, gap: Gap) -> None:
    if gap.bytes:
        target.write(msgspec.json.encode(gap) + b"\n")
