"""Make a closed segment smaller: thin frequent events, keep rare events and every peak.

The compacted segment replaces the old one atomically. After a crash, one of the two exists. A process that is
reading the old segment can read it to its end. A `Gap` replaces removed lines and holds their number and
length. So positions in the segment stay valid, and readers count the removed events as thinned, not as lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from memlog._internal.safe_files import open_plain, replacing
from memlog.events import SCHEMA_VERSION, Event
from memlog.journal.format import MAX_LINE_BYTES, UNDECODABLE, Compaction, Gap, Header, Record

LevelsOf: TypeAlias = Callable[[Event], "dict[str, float] | None"]
"""Function that returns names and values of an event. For each name, `compact` compares the values of several
events. The function returns ``None`` if the event must be kept without comparison."""

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

    A segment is closed if its process has begun a later segment. Call this function only if `is_compactable`
    returns True. Events of one type are compared in groups of ``window`` consecutive events. The last event
    of each group is kept. For each name that ``levels`` returns, the group's first event with the greatest
    value is also kept. ``delivered`` is True if every sink has received the events.

    Raises:
        OSError: The segment can't be read or written. It is unchanged.
    """
    with open_plain(path.parent, path.name) as source:
        first_line = source.readline(MAX_LINE_BYTES)
        kept = _kept(_lines(source), window, levels)
        with replacing(path.parent, path.name) as target:
            compaction = Compaction(window, len(first_line))
            header = msgspec.structs.replace(_HEADER.decode(first_line), compaction=compaction)
            target.write(msgspec.json.encode(header) + b"\n")
            source.seek(len(first_line))
            removed = _copy(source, target, kept, delivered=delivered)
            target.flush()
            os.fsync(target.fileno())
            status = os.fstat(source.fileno())
            # The modification time stays, because it shows whether the run is alive, and when it ended.
            os.utime(target.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return removed


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines, without the zero bytes behind the last one (`memlog.journal.mapped_file`)."""
    for line in file:
        data = line if line.endswith(b"\n") else line.rstrip(b"\0")
        if data:
            yield data


def _kept(lines: Iterable[bytes], window: int, levels: LevelsOf) -> set[int]:
    """Return the indices of the lines to keep.

    Keep lines that can't be decoded, and events that must stay. Of the others, keep the last line and the
    peaks of each window.
    """
    kept: set[int] = set()
    windows: dict[type[Event], _EventWindow] = {}
    for index, line in enumerate(lines):
        event = _event(line)
        compared = None if event is None else levels(event)
        if event is None or compared is None:
            kept.add(index)
            continue
        current = windows.setdefault(type(event), _EventWindow())
        current.take(index, compared)
        if current.events >= window:
            kept |= windows.pop(type(event)).kept()
    return kept.union(*(left.kept() for left in windows.values()))


class _EventWindow:
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


def _event(line: bytes) -> Event | None:
    try:
        return _RECORD.decode(line).event
    except UNDECODABLE:
        return None


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
