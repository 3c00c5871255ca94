"""Segments of a journal: written in mapped space without system calls, and made smaller when they are closed.

The file is allocated in windows, before a window is mapped: a store into a hole of a file on a full disk
would end the process with SIGBUS. A new window is zero, and a line contains no zero byte. So the data ends at
the first zero byte, and a line is complete if it has its newline and no zero byte. No length has to be
published beside the data. The kernel owns the pages, so lines survive the end of the process in any way.

The compacted segment replaces the old one atomically. After a crash, one of the two exists. A process that is
reading the old segment can read it to its end. A `Gap` replaces removed lines and holds their number and
length. So positions in the segment stay valid, and readers count the removed events as thinned, not as lost.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from memlog._internal import processes
from memlog._internal.processes import Descriptor
from memlog._internal.safe_files import open_plain, replacing
from memlog.events import (
    SCHEMA_VERSION,
    Alert,
    Artifact,
    End,
    Event,
    Exit,
    Finding,
    Health,
    OutOfMemory,
)
from memlog.journal.format import (
    MAX_LINE_BYTES,
    UNDECODABLE,
    Compaction,
    Gap,
    Header,
    Record,
    segment_name,
)

WINDOW = 64 * 1024
"""Bytes that are allocated and mapped at a time, about 500 batch events."""
RESERVE = 16 * 1024
"""Bytes behind each window that are allocated for the run's last events. Other events leave them free."""
_FOR_THE_END = RESERVE // 4
"""Bytes of the reserve that only the run's end and its counts may use."""
_GROW_EVERY = 10
"""On a full disk, memlog tries to allocate the next window at one of this number of events."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_LOCAL = frozenset({"ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs"})
"""File systems on which allocated space can be mapped safely.

Over a network, or in FUSE, a store could wait for a server while no other thread can run. Copy-on-write file
systems (Btrfs, ZFS) need new space for each store.
"""
_MADV_POPULATE_WRITE = 23
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def can_map(directory: Path) -> bool:
    """Return True if files in a folder can be preallocated and mapped."""
    if not hasattr(os, "posix_fallocate") or sys.maxsize < 2**32:
        return False
    try:
        device = directory.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # Fields of a line: id, parent, major:minor, …, "-", type, … (proc_pid_mountinfo(5)).
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        if f" {number} " in mount:
            return kind.partition(" ")[0] in _LOCAL
    return False


class MappedFile:
    """One segment, written through memory. Its header is the first line.

    `close` cuts the file behind the last line. The file of a killed process keeps its zero bytes. ``window``
    is the number of bytes to allocate at a time. A line may be stored at ``view[at:]`` up to ``limit``, as
    `write` does.

    Raises:
        OSError: The file can't be created, allocated or mapped. The file does not exist then.
    """

    def __init__(self, directory: Path, header: Header, window: int = WINDOW) -> None:
        path = directory / segment_name(f"{header.role}-{header.process.pid}", header.segment)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._generation, self._room = processes.generation, window
        self._window: _Window | None = None
        self.view = memoryview(b"")
        self.at = self.limit = self._length = self._refused = 0
        self._descriptor = Descriptor(os.open(path, flags, 0o644))
        try:
            line = msgspec.json.encode(header) + b"\n"
            self._grow(len(line))
            self.write(line, None)
        except BaseException:
            self.close()
            with suppress(OSError):
                path.unlink()
            raise

    def write(self, line: bytes, event: Event | None) -> None:
        """Write a line. ``event`` is the line's event, which decides if the line may use the reserve.

        Raises:
            OSError: There is no room. Nothing was written.
        """
        size = len(line)
        if self.at + size > self.limit:
            self._write_at_the_limit(line, size, event)
            return
        # No call until the position is stored: a signal handler that writes, too, must not run in between.
        at = self.at
        end = at + size
        self.view[at:end] = line
        self.at = end

    def _write_at_the_limit(self, line: bytes, size: int, event: Event | None) -> None:
        """Write into the next window. If it can't be allocated, write into the reserve."""
        full, spared = None, _spared(event)
        if self._refused % _GROW_EVERY == 0 or spared < RESERVE:
            try:
                self._grow(size)
            except OSError as error:
                full = error
            else:
                self._refused = 0
                self.write(line, event)
                return
        at = self.at  # no call from here, as above
        end = at + size
        if end + spared <= self._length:
            self.view[at:end] = line
            self.at = end
            return
        self._refused += 1
        raise full or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _grow(self, size: int) -> None:
        """Allocate and map room behind the last line: ``size`` bytes, a window and the reserve."""
        at = self.at if self._window is None else self._window.begin + self.at
        # A mapping begins at a multiple of the granularity.
        begin = at & -mmap.ALLOCATIONGRANULARITY
        room = size + self._room + RESERVE + mmap.ALLOCATIONGRANULARITY
        window = _Window(self._descriptor.number, begin, room & -mmap.PAGESIZE)
        known = self._window  # no call from here, as above
        if known is not None:
            self.at += known.begin - window.begin
        self._window, self.view, self._length = window, window.view, window.length
        self.limit = window.length - RESERVE
        # Not earlier: a signal handler could still write into the old window.
        if known is not None:
            known.unmap()

    def is_there(self) -> bool:
        """Return True if the file is open, and was not deleted."""
        status = self._descriptor.status()
        return status is not None and status.st_nlink > 0

    def close(self) -> None:
        """Cut and close the file. Calling it again is harmless."""
        window, self._window = self._window, None
        # A copy of this object in a child of `fork` must not cut the parent's file.
        if window is not None and processes.generation == self._generation:
            # Before the space is unmapped: a store into it would end the process.
            self.view, self.limit, self._length = memoryview(b""), 0, 0
            window.unmap()
            if self._descriptor.status() is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor.number, window.begin + self.at)
        self._descriptor.close()


class _Window:
    """Mapped part of a file, from the byte ``begin``. Its space is allocated first.

    The module `mmap` is not used: its objects have a descriptor of their own, and close it by its number even
    if that number belongs to another file now, as in a program that became a daemon.

    Raises:
        OSError: The part can't be allocated or mapped.
    """

    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        os.posix_fallocate(descriptor, begin, length)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, length, protection, mmap.MAP_SHARED, descriptor, begin)
        if address == _FAILED:
            raise _last_error()
        self.begin, self.length = begin, length
        self._address: int | None = address
        # All pages at once: otherwise the resident set would grow with the journal. If a page can't be
        # written, the call fails, where a store would end the process. Linux before 5.14 lacks the call.
        if (
            _libc.madvise(address, length, _MADV_POPULATE_WRITE)
            and ctypes.get_errno() != errno.EINVAL
        ):
            error = _last_error()
            self.unmap()
            raise error
        self.view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")

    def unmap(self) -> None:
        address, self._address = self._address, None
        if address is not None:
            _libc.munmap(address, self.length)

    def __del__(self) -> None:
        """Free the address space if the journal was not closed."""
        # If the space could not be allocated, the attribute is missing.
        if hasattr(self, "_address"):
            self.unmap()


def _spared(event: Event | None) -> int:
    """Return the bytes at the end of the allocated space that an event must leave free."""
    if isinstance(event, (End, Exit)):
        return 0
    if isinstance(event, Health) and (event.overhead_ms is None or event.steps is not None):
        return 0  # the last one of the trainer or of the helper process
    if isinstance(event, (Alert, Artifact, Finding, OutOfMemory)):
        return _FOR_THE_END
    return RESERVE


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


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
        # Two passes, because the lines to keep are known only at the end of their window.
        kept = _kept(_lines(source), window, levels)
        with replacing(path.parent, path.name) as target:
            compaction = Compaction(window, len(first_line))
            header = msgspec.structs.replace(_HEADER.decode(first_line), compaction=compaction)
            target.write(msgspec.json.encode(header) + b"\n")
            source.seek(len(first_line))
            removed = _copy(source, target, kept, delivered=delivered)
            # On the disk before it replaces the old file: otherwise a power failure could leave an
            # empty file.
            target.flush()
            os.fsync(target.fileno())
            status = os.fstat(source.fileno())
            # The modification time stays, because it shows whether the run is alive, and when it ended.
            os.utime(target.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return removed


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines, without the zero bytes behind the last one (`memlog.journal.segments`)."""
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
    # The empty line at the end writes the gap before it.
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
