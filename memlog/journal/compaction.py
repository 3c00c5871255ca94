"""Make a closed segment smaller: thin frequent events, keep rare events and every peak.

The compacted segment replaces the old one atomically. After a crash, one of the two exists. A process that is
reading the old segment can read it to its end. A `Gap` replaces removed lines and holds their number and
length. So positions in the segment stay valid, and readers count the removed events as thinned, not as lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from memlog._internal.safe_files import open_plain, replacing
from memlog.events import SCHEMA_VERSION, Event
from memlog.journal.format import MAX_LINE_BYTES, UNDECODABLE, Compaction, Gap, Header, Record

LevelsOf: TypeAlias = Callable[[Event], "dict[str, float] | None"]
"""Function that returns an event's values by name, or ``None`` if the event must be kept. In each window,
`compact` keeps, for each name, the event with the greatest value."""

_HEADER = msgspec.json.Decoder(Header)
_RECORD = msgspec.json.Decoder(Record)


def is_compactable(path: Path) -> bool:
    """Return True if a segment was not compacted yet, and its header is readable and has a known schema."""
    try:
        with open_plain(path.parent, path.name) as file:
            header = _HEADER.decode(file.readline(MAX_LINE_BYTES))
    except (OSError, *UNDECODABLE):
        return False
    return header.schema <= SCHEMA_VERSION and header.compaction is None


def compact(path: Path, window: int, levels: LevelsOf, *, delivered: bool) -> int:
    """Make a closed segment smaller, and return the number of removed events.

    A segment is closed if a later segment of its process exists. Of each ``window`` consecutive events of one
    kind, keep the last event and, for each value, the first event in which the value is greatest.

    Args:
        path: The segment. `is_compactable` has returned True for it.
        window: Number of consecutive events of one kind that are compared.
        levels: Returns the values to compare, or ``None`` for events that must stay.
        delivered: True if every sink has received the events.

    Raises:
        OSError: The segment can't be read or written. It is unchanged.
        ValueError: A line is longer than memlog writes. The segment is unchanged.
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
            removed = _copy(source, target, kept.indices, delivered=delivered)
            target.flush()
            os.fsync(target.fileno())
            status = os.fstat(source.fileno())
            # The modification time stays, because it shows whether the run is alive, and when it ended.
            os.utime(target.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return removed


class _Kept:
    """Choice of the lines to keep, by index.

    A line is kept without comparison if it can't be decoded, or if its event must stay.
    """

    def __init__(self, window: int, levels: LevelsOf) -> None:
        self.indices: set[int] = set()
        self._window = window
        self._levels = levels
        self._open: dict[type[Event], _EventWindow] = {}

    def take(self, index: int, line: bytes) -> None:
        event = _event(line)
        levels = None if event is None else self._levels(event)
        if event is None or levels is None:
            self.indices.add(index)
            return
        window = self._open.setdefault(type(event), _EventWindow())
        window.take(index, levels)
        if window.events >= self._window:
            self.indices |= self._open.pop(type(event)).kept()

    def finish(self) -> None:
        for window in self._open.values():
            self.indices |= window.kept()


class _EventWindow:
    """Window of consecutive events of one kind."""

    def __init__(self) -> None:
        self.events = 0
        self._last = 0
        self._greatest: dict[str, tuple[float, int]] = {}

    def take(self, index: int, levels: dict[str, float]) -> None:
        self.events += 1
        self._last = index
        for name, value in levels.items():
            greatest = self._greatest.get(name)
            if greatest is None or value > greatest[0]:
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
    compaction = Compaction(window, len(first_line))
    header = msgspec.structs.replace(_HEADER.decode(first_line), compaction=compaction)
    return msgspec.json.encode(header) + b"\n"


def _copy(source: BinaryIO, target: BinaryIO, kept: set[int], *, delivered: bool) -> int:
    """Copy the lines to keep, with gaps in place of the others; return the number of removed events."""
    removed = events = size = 0
    for index, line in enumerate(chain(_lines(source), [b""])):
        if line and index not in kept:
            events, size = events + 1, size + len(line)
            continue
        if events:
            gap = Gap(events, events if delivered else 0, size)
            target.write(msgspec.json.encode(gap) + b"\n")
            removed, events, size = removed + events, 0, 0
        target.write(line)
    return removed
