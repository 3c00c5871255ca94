"""Read a journal as a stream. A journal is untrusted input."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from memlog._internal.safe_files import open_plain
from memlog.events import EVENT_TYPES, SCHEMA_VERSION, End, Event
from memlog.journal.format import (
    MAX_LINE_BYTES,
    MAX_OFFSET,
    START,
    UNDECODABLE,
    Gap,
    Header,
    Position,
    Record,
    parse_segment_name,
    segment_name,
)

_MAX_PADDING = 4 * MAX_LINE_BYTES
"""Maximum number of zero bytes behind a segment's last line. memlog allocates fewer."""

_END_TAG = b'["end",'
_TAGS = frozenset(kind.__struct_config__.tag for kind in EVENT_TYPES)


@lru_cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder. It is made at first use, because a trainer only writes and needs no decoder."""
    return msgspec.json.Decoder(kind)


def segments_in(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the process and the number of each segment in a folder. Segments are plain files."""
    # The in-process writer calls this in every pass, and a glob takes three times as long.
    with os.scandir(directory) as entries:
        for entry in entries:
            # `is_file` may cost a system call, so the name is tested first.
            segment = parse_segment_name(entry.name)
            if segment is not None and entry.is_file(follow_symlinks=False):
                yield segment


def used_bytes(path: Path) -> int:
    """Return the length of a segment without the zero bytes behind its last line.

    The segment of a running or killed process has such bytes (`memlog.journal.segments`).

    Raises:
        OSError: The segment can't be read.
    """
    with open_plain(path.parent, path.name) as file:
        return _used_bytes(file)


def _used_bytes(file: BinaryIO) -> int:
    size = end = file.seek(0, os.SEEK_END)
    # From the end, because few zero bytes follow the data.
    while end > 0 and size - end < _MAX_PADDING:
        begin = max(end - 64 * 1024, 0)
        used = os.pread(file.fileno(), end - begin, begin).rstrip(b"\0")
        if used:
            return begin + len(used)
        end = begin
    return end


class Entry(NamedTuple):
    """One event, as read from the journal."""

    seq: int
    event: Event
    header: Header
    start: Position
    """Beginning of the event's line. In a compacted segment, this is the position before compaction."""
    end: Position
    """Beginning of the next line."""


class JournalFile:
    """The segments of one process, read in order.

    Attributes:
        process: Name of the process in the file names, such as ``trainer-4242``.
        skipped: Number of lines that this object could not read, by reason: ``torn`` (the writer died or the
            disk was full), ``garbage``, ``too_long``, ``unknown_event`` (from a newer memlog),
            ``newer_schema``.
        thinned: Number of removed events in the part of the journal that was read so far. memlog removed them
            to keep the journal's size limit.
        thinned_undelivered: Number of these removed events that some sink had not received.
    """

    def __init__(self, directory: Path, process: str) -> None:
        self.process = process
        self.skipped: Counter[str] = Counter()
        self.thinned = self.thinned_undelivered = 0
        self._directory = directory

    @property
    def segments(self) -> list[int]:
        try:
            listed = list(segments_in(self._directory))
        except OSError:
            return []
        return sorted(segment for process, segment in listed if process == self.process)

    @property
    def size(self) -> int:
        """Bytes of all segments together, without zero bytes at their ends."""
        return sum(used_bytes(self.path(segment)) for segment in self.segments)

    def bytes_before(self, position: Position) -> int:
        """Return the number of bytes before ``position``; an estimate if a segment was compacted."""
        sizes = {number: used_bytes(self.path(number)) for number in self.segments}
        earlier = sum(size for number, size in sizes.items() if number < position.segment)
        return earlier + min(position.offset, sizes.get(position.segment, 0))

    def headers(self) -> Iterator[Header]:
        """Return the segments' headers in order, without those that can't be read."""
        return (header for _, header in self.headers_after(0))

    def headers_after(self, segment: int) -> Iterator[tuple[int, Header]]:
        """Yield number and header of each segment after ``segment``. Skip headers that can't be read."""
        for number in self.segments:
            if number > segment:
                with self._open(number) as file:
                    # A header that is still being written lacks its newline, or has zero bytes.
                    header = self._read_header(file)
                if header is not None:
                    yield number, header

    def read(self, start: Position = START, *, complete: bool = False) -> Iterator[Entry]:
        """Return the events from ``start`` to the last complete line.

        While the process still writes, call this again from the last `Entry.end` for newer events. If the
        segment of ``start`` does not exist any more, reading begins with the next existing segment.

        Args:
            start: Position to begin at.
            complete: True if the process has ended. If so, an incomplete last line counts as torn.
        """
        segments = [number for number in self.segments if number >= start.segment]
        for number in segments:
            offset = start.offset if number == start.segment else 0
            # The writer appends to the last segment only, so all earlier segments are complete.
            last = number == segments[-1]
            yield from self._read_segment(number, offset, complete=complete or not last)

    def first_end(self, segment: int) -> End | None:
        """Return the first event of the run's end in ``segment`` and later ones; ``None`` if there is none.

        Only lines that have the event's tag are decoded: two segments can have 200,000 lines.
        """
        for number in self.segments:
            if number < segment:
                continue
            with self._open(number) as file:
                header = self._read_header(file)
                if header is None or header.schema > SCHEMA_VERSION:
                    continue
                while line := file.readline(MAX_LINE_BYTES):
                    # Quotes within a text of JSON have a backslash.
                    if _END_TAG in line and line.endswith(b"\n"):
                        record = self._decode(line)
                        if record is not None and isinstance(record.event, End):
                            return record.event
        return None

    def has_grown(self, at: Position) -> bool:
        """Return True if there may be events after ``at``. Reading takes six times as many system calls."""
        try:
            descriptor = os.open(self.path(at.segment), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return True
        try:
            following = os.pread(descriptor, 1, at.offset)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        # A zero byte is space of a mapped segment that has no line yet.
        return following not in (b"", b"\0") or self.path(at.segment + 1).exists()

    def last_write(self) -> float | None:
        """Return the time of the last change, Unix time in seconds; ``None`` if there is no segment.

        The system does not record the time of each store into mapped memory. So if the newest segment is
        mapped, this is the time of its last event, if that is later.
        """
        segment = max(self.segments, default=None)
        if segment is None:
            return None
        with self._open(segment) as file:
            changed, end = os.fstat(file.fileno()).st_mtime, _used_bytes(file)
            if end == file.seek(0, os.SEEK_END):
                return changed
            begin = max(end - MAX_LINE_BYTES, 0)
            lines = os.pread(file.fileno(), end - begin, begin).split(b"\n")
        # Without the last part, which has no newline: it is empty or incomplete.
        for line in reversed(lines[:-1]):
            try:
                record: Record = _decoder(Record).decode(line)
            except UNDECODABLE:
                continue
            return max(changed, record.event.time_us / 1e6)
        return changed

    def path(self, segment: int) -> Path:
        return self._directory / segment_name(self.process, segment)

    def _open(self, segment: int) -> BinaryIO:
        return open_plain(self._directory, segment_name(self.process, segment))

    def _read_segment(self, number: int, offset: int, *, complete: bool) -> Iterator[Entry]:
        with self._open(number) as file:
            header = self._read_header(file)
            if header is None:
                return
            if header.schema > SCHEMA_VERSION:
                self.skipped["newer_schema"] += 1
                return
            # In a compacted segment, offsets are not places in the file. So all of its lines are
            # read.
            if header.compaction is None:
                file.seek(max(offset, file.tell()))
            for entry in self._read_lines(file, header, number, complete=complete):
                if entry.start.offset >= offset:
                    yield entry

    def _read_header(self, file: BinaryIO) -> Header | None:
        line = file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n") or b"\0" in line:
            return None
        try:
            header: Header = _decoder(Header).decode(line)
        except UNDECODABLE:
            self.skipped["garbage"] += 1
            return None
        return header

    def _read_lines(
        self, file: BinaryIO, header: Header, number: int, *, complete: bool
    ) -> Iterator[Entry]:
        compaction = header.compaction
        position = file.tell() if compaction is None else compaction.begins
        while line := file.readline(MAX_LINE_BYTES):
            begun = position
            if b"\0" in line and len(line) < MAX_LINE_BYTES:
                settled = _settled(file, line, complete=complete)
                if settled is None:
                    if complete and line.strip(b"\0"):
                        self.skipped["torn"] += 1
                    return
                line = settled
            position += len(line)
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    position += _skip_line(file)
                    self.skipped["too_long"] += 1
                    continue
                if complete:
                    self.skipped["torn"] += 1
                return
            if compaction is not None and (gap := _gap(line)):
                position = min(begun + gap.bytes, MAX_OFFSET)
                self.thinned += gap.events
                self.thinned_undelivered += gap.events - gap.delivered
                continue
            record = self._decode(line)
            if record is not None:
                yield Entry(
                    record.seq,
                    record.event,
                    header,
                    Position(number, begun),
                    Position(number, position),
                )

    def _decode(self, line: bytes) -> Record | None:
        try:
            record: Record = _decoder(Record).decode(line)
        except UNDECODABLE:
            self.skipped[_why_unreadable(line)] += 1
            return None
        return record


def _settled(file: BinaryIO, line: bytes, *, complete: bool) -> bytes | None:
    """Read a line with zero bytes again; return ``None`` if the data of a mapped segment ends in this line.

    While the writer copies a line, a reader may see any of its bytes as zero. A line that is followed by
    another is complete by now. If it still has zero bytes, the segment is damaged.
    """
    begin = file.tell() - len(line)
    if not line.endswith(b"\n"):
        return None
    following = os.pread(file.fileno(), 1, begin + len(line))
    if following in (b"", b"\0") and not complete:
        return None
    again, newline, _ = os.pread(file.fileno(), len(line), begin).partition(b"\n")
    file.seek(begin + len(again) + len(newline))
    return again + newline


def _gap(line: bytes) -> Gap | None:
    if not line.startswith(b"{"):
        return None
    try:
        gap: Gap = _decoder(Gap).decode(line)
    except UNDECODABLE:
        return None
    # A damaged or forged journal may hold any numbers. Positions must increase, so `bytes` must be above 0.
    return gap if gap.bytes > 0 and 0 <= gap.delivered <= gap.events else None


def _why_unreadable(line: bytes) -> str:
    """Return the reason why a line can't be decoded.

    A complete record whose event has an unknown tag comes from a newer memlog.
    """
    try:
        _, event = _decoder(tuple[int, msgspec.Raw]).decode(line)
        tag = msgspec.json.decode(event)[0]
    except (*UNDECODABLE, TypeError, IndexError, KeyError):
        return "torn" if line.startswith(b"[") and not line.endswith(b"]\n") else "garbage"
    return "unknown_event" if isinstance(tag, str) and tag not in _TAGS else "garbage"


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while chunk := file.readline(MAX_LINE_BYTES):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped
