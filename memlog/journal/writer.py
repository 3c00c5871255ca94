"""Append events to the journal, from the trainer's thread, also if the disk is slow.

On a slow file system, a background thread makes the system calls.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import Descriptor
from memlog._internal.signals import raised_by_handler
from memlog.errors import UnwritableDirectoryError
from memlog.events import Batch, Event, readings
from memlog.journal.format import Binding, Header, ProcessIdentity, Record, Role, segment_name
from memlog.journal.segments import DISK_FULL, WINDOW, MappedFile, can_map

SLOW_WRITE_NS = 1_000_000
"""Nanoseconds above which a write counts as slow."""
SLOW_WRITES = 20
"""If at least this number of writes are slow among `_WRITES` consecutive writes, the disk counts as slow."""
_WRITES = 200

# PyDLL, unlike CDLL, keeps the GIL during a call.
_write = ctypes.PyDLL(None).write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Disk:
    """Writer that measures whether the disk is slow.

    ``os.write`` releases the GIL. If another thread computes meanwhile, getting the GIL back takes 5 ms or
    more. So a slow write counts only if the write kept the GIL. In each group of `_WRITES` writes, all writes
    after the first slow write keep the GIL.
    """

    def __init__(self) -> None:
        self._writes = self._slow = 0
        self._suspected = False

    def write(self, fd: int, data: bytes) -> int:
        """Call ``write(2)`` and return the number of bytes written.

        Raises:
            OSError: Nothing was written.
        """
        begun = time.perf_counter_ns()
        written = write_keeping_the_gil(fd, data) if self._suspected else os.write(fd, data)
        self._took(time.perf_counter_ns() - begun)
        return written

    @property
    def is_slow(self) -> bool:
        """True if waiting for each write would slow training down."""
        return self._slow >= SLOW_WRITES

    def try_again(self) -> None:
        """Count a slow disk as fast. If one of the next `_WRITES` writes is slow, the disk is slow again."""
        self._writes, self._slow, self._suspected = 0, SLOW_WRITES - 1, True

    def _took(self, ns: int) -> None:
        if self._writes >= _WRITES:
            self._writes, self._slow, self._suspected = 0, 0, False
        self._writes += 1
        if ns > SLOW_WRITE_NS:
            self._slow += self._suspected
            self._suspected = True


def write_keeping_the_gil(fd: int, data: bytes) -> int:
    """Write like `os.write`, but keep the GIL, so that other threads do not make the call longer.

    Raises:
        OSError: Nothing was written.
    """
    written: int = _write(fd, data, len(data))
    # On failure, os.write makes the call again: it raises the right error, and retries after EINTR.
    return written if written >= 0 else os.write(fd, data)


MAX_WAITING = 100_000
"""Maximum number of queued writes, about 15 MB of batch events. Further writes are dropped."""
CLOSE_TIMEOUT = 5.0
"""Maximum seconds that `WriteQueue.close` waits for queued writes."""


class WriteQueue:
    """Queue of writes. The queue's own thread runs them in order."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._waiting: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._put = self._done = 0
        self._thread = threading.Thread(target=self._run, name="memlog-journal", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], Any]) -> None:
        """Queue a write and return at once. If the queue is full, drop the write and count it."""
        if self._waiting.qsize() < MAX_WAITING:
            self.put_always(write)
            return
        self._diagnostics.drop(
            "journal_queue_full",
            "the disk is so slow that the journal's queue is full; training goes on, and memlog counts the "
            "events that are lost (set MEMLOG_DIR to a local disk)",
        )

    def put_always(self, operation: Callable[[], Any]) -> None:
        """Queue an operation that must not be dropped, such as beginning a new segment."""
        self._put += 1
        self._waiting.put(operation)

    @property
    def is_idle(self) -> bool:
        """True if every queued operation is done. If so, the caller may run the next operation itself."""
        # Each of the two numbers is changed by one thread at a time, so no lock is needed.
        return self._done == self._put

    def end(self) -> None:
        """Tell the thread to end after the last queued operation; do not wait for the thread."""
        self._waiting.put(None)

    def close(self) -> bool:
        """End the thread and wait at most `CLOSE_TIMEOUT` seconds; return True if everything was written."""
        self.end()
        self._thread.join(CLOSE_TIMEOUT)
        return not self._thread.is_alive()

    def waiting(self) -> int:
        return self._waiting.qsize()

    def _run(self) -> None:
        while (operation := self._waiting.get()) is not None:
            with self._diagnostics.contained("writing the journal"):
                operation()
            self._done += 1


LOOK_EVERY_S = 1.0
"""Seconds between measurements of the journal's size while the journal is too large."""
EVERY = 1_000
"""Maximum number of steps from one written step to the next, while the journal is too large."""


class Backpressure:
    """Filter that drops most steps while the journal is too large. Steps with a new peak are always kept.

    Above ``limit`` bytes, the helper process makes the run's journal smaller. Above 1.5 times the limit, the
    journal is too large. If ``limit`` is ``None``, the journal is never too large.
    """

    def __init__(self, directory: Path, limit: int | None, diagnostics: Diagnostics) -> None:
        self._directory = directory
        self._ceiling = None if limit is None else limit * 3 // 2
        self._diagnostics = diagnostics
        self._next_look = 0.0
        self._highest: dict[str, int] = {}
        self._since_written = 0
        self.active = False
        """True while the journal is too large."""

    def measure(self) -> None:
        if self._ceiling is not None:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            self.active = self._folder_size() > self._ceiling

    def admits(self, event: Event) -> bool:
        """Return True if ``event`` is to be written. Otherwise count the event as dropped."""
        if not isinstance(event, Batch):
            return True
        if time.monotonic() >= self._next_look:
            self.measure()
        self._since_written += 1
        # The peak first: it must be compared at every step.
        if self._has_new_peak(event) or self._since_written >= EVERY or not self.active:
            self._since_written = 0
            return True
        self._diagnostics.drop(
            "journal_full",
            f"the journal in {self._directory} is larger than its limit. Until its helper process has made "
            f"it smaller, memlog writes only steps with a new peak and one in {EVERY:,} of the others: pass "
            "a larger journal_limit to keep more",
        )
        return False

    def _has_new_peak(self, event: Batch) -> bool:
        sizes = {reading.name: reading.peak for reading in readings(event)}
        higher = {
            name: size
            for name, size in sizes.items()
            if size is not None and size > self._highest.get(name, -1)
        }
        self._highest.update(higher)
        return bool(higher)

    def _folder_size(self) -> int:
        try:
            with os.scandir(self._directory) as entries:
                # With the bytes that running processes have allocated ahead. To leave these out, every file
                # would have to be opened.
                return sum(e.stat().st_size for e in entries if e.name.endswith(".jsonl"))
        except OSError:
            # The folder was deleted or can't be read, or a segment was just replaced: measure again later.
            return 0


Put: TypeAlias = Callable[[int, bytes], int]

CHECK_EVERY = 200
"""Number of writes between checks that the file still exists."""
TRY_AGAIN_S = 5.0
"""Minimum seconds that the first queue lasts. Then memlog tests the disk's speed by writes without a queue.
Each further queue doubles the seconds, up to `MAX_TRY_AGAIN_S`."""
MAX_TRY_AGAIN_S = 320.0


class SegmentOutput:
    """Output to the current segment of a process.

    A failed write loses only its line. Each loss is counted, and the first one is logged. ``on_switch`` is
    called on the writing thread after a segment has begun, except for the first segment. A segment gets about
    ``segment_bytes`` bytes.

    Raises:
        OSError: The first segment can't be created.
    """

    def __init__(
        self,
        directory: Path,
        header: Header,
        diagnostics: Diagnostics,
        on_switch: Callable[[], object],
        segment_bytes: int = WINDOW,
    ) -> None:
        self._window = min(WINDOW, segment_bytes)
        self._directory = directory
        self._diagnostics = diagnostics
        self._on_switch = on_switch
        self._disk = Disk()
        self._queue: WriteQueue | None = None
        self._try_at, self._try_after = 0.0, TRY_AGAIN_S
        self.unchecked = 0
        self._gone = False
        self._can_map = can_map(directory)
        self._file = self._created(header, is_first=True)
        self.mapped: MappedFile | None = None
        """The file, if lines are written to it at once, and it is mapped."""
        self._find_mapped()

    @property
    def queued(self) -> bool:
        return self._queue is not None

    def write(self, line: bytes, event: Event) -> None:
        """Write a line, whose event is ``event``."""
        if self.mapped is not None:
            self._write(line, event)
        elif self._queue is not None and not self._leaves(self._queue):
            self._queue.put(partial(self._write, line, event))
        else:
            self._write(line, event, self._disk.write)
            if self._disk.is_slow:
                self._move_to_queue()

    def begin_segment(self, header: Header) -> None:
        """Write later lines to a new segment; if it can't be created, continue in the old one."""
        switch = partial(self._switch_file, header)
        if self._queue is not None:
            self._queue.put_always(switch)
        else:
            switch()

    def close(self) -> None:
        """Write all queued lines, and close the segment.

        Lines that are not written after `memlog.journal.writer.CLOSE_TIMEOUT` seconds count as lost.
        """
        if self._queue is None or self._queue.close():
            self._file.close()
        else:
            self._diagnostics.drop(
                "journal_queue_full",
                "the disk was too slow for the journal's last events, which are lost",
                # Includes the queue's end mark, which stands for the write that is in progress.
                count=self._queue.waiting(),
            )

    def _created(self, header: Header, *, is_first: bool = False) -> MappedFile | SegmentFile:
        """Create a segment, mapped if possible.

        Raises:
            OSError: The segment can't be created. Unless it is the first, this includes a disk without room
                for a mapped segment: the old segment has a reserve there.
        """
        if self._can_map:
            try:
                return MappedFile(self._directory, header, self._window)
            except OSError as error:
                if raised_by_handler(error) or (error.errno in DISK_FULL and not is_first):
                    raise
        return SegmentFile(self._directory, header)

    def _switch_file(self, header: Header) -> None:
        try:
            file = self._created(header)
        except OSError as error:
            if raised_by_handler(error):
                raise
            if not self._file.is_there():
                self._gone = True
                self._find_mapped()
            else:
                self._diagnostics.count_fault(
                    f"beginning the journal's next segment: {type(error).__name__}"
                )
                self._diagnostics.say_once(
                    "journal_write",
                    f"the journal in {self._directory} can't begin a new file: {error.strerror}; memlog "
                    "writes to the old one as long as it can, and prints at the end how many events are "
                    "lost, if any",
                )
            return
        # In this order: after the close, the old file's descriptor may belong to a file of the user's.
        old, self._file = self._file, file
        self._find_mapped()
        old.close()
        self._on_switch()

    def _write(self, line: bytes, event: Event, put: Put = os.write) -> None:
        self.unchecked += 1
        if self.unchecked >= CHECK_EVERY or self._gone:
            self._check_file()
        if self._gone:
            return
        file = self._file
        try:
            if isinstance(file, MappedFile):
                file.write(line, event)
            else:
                file.write(line, put)
        except OSError as error:
            self.lose(error, file, line, event)

    def lose(
        self, error: OSError, file: MappedFile | SegmentFile, line: bytes, event: Event
    ) -> None:
        """Count a line that could not be written to a file.

        If a signal handler has begun the next segment just before the write, the file is closed. The line is
        then written to the next segment.
        """
        if raised_by_handler(error):
            raise error
        if file is not self._file:
            self._write(line, event)
            return
        self._diagnostics.drop(
            "journal_write",
            f"an event could not be written to {self._directory}: {error.strerror}; training goes "
            "on without it (free some space there; memlog prints at the end how many are lost)",
        )

    def _check_file(self) -> None:
        """If the file was deleted, count the events since the last check as lost."""
        unseen, self.unchecked = self.unchecked, 0
        if not self._gone and self._file.is_there():
            return
        self._gone = True
        self._find_mapped()
        self._diagnostics.drop(
            "journal_gone",
            f"the journal in {self._directory} was deleted; training goes on without it (memlog prints at "
            "the end how many events are lost)",
            count=unseen,
        )

    def _move_to_queue(self) -> None:
        self._queue = WriteQueue(self._diagnostics)
        self._try_at = time.monotonic() + self._try_after
        self._try_after = min(self._try_after * 2, MAX_TRY_AGAIN_S)
        self._diagnostics.say_once(
            "slow_disk",
            f"writing to {self._directory} is slow (over 1 ms a write), so it moved to a background "
            "queue until it is fast again: a crash may lose the queued events (set MEMLOG_DIR to a local "
            "disk)",
        )

    def _find_mapped(self) -> None:
        file, at_once = self._file, self._queue is None and not self._gone
        self.mapped = file if at_once and isinstance(file, MappedFile) else None

    def _leaves(self, queue: WriteQueue) -> bool:
        """End an empty queue when the time has come to test the disk again.

        Return True if the queue was ended. After that, one slow write is enough to start a new queue.
        """
        # Only an idle queue may end: otherwise this line would come before the queued ones.
        if time.monotonic() < self._try_at or not queue.is_idle:
            return False
        queue.end()
        self._queue = None
        self._find_mapped()
        self._disk.try_again()
        return True


class SegmentFile:
    """One segment, open for appending. Its header is written as the first line.

    Raises:
        OSError: The file can't be created, or the header can't be written. The file does not exist then.
    """

    def __init__(self, directory: Path, header: Header) -> None:
        path = directory / segment_name(f"{header.role}-{header.process.pid}", header.segment)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._torn = False
        self._descriptor = Descriptor(os.open(path, flags, 0o644))
        try:
            self.write(msgspec.json.encode(header) + b"\n")
        except BaseException:
            self.close()
            with suppress(OSError):
                path.unlink()  # a segment without a header is invalid
            raise

    def write(self, line: bytes, put: Put = os.write) -> None:
        """Write a line with one call of ``put``. If the previous line was cut off, begin with a newline."""
        data = b"\n" + line if self._torn else line
        written = put(self._descriptor.number, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(None, "the disk is full")

    def is_there(self) -> bool:
        """Return True if the file is open, and was not deleted."""
        status = self._descriptor.status()
        return status is not None and status.st_nlink > 0

    def close(self) -> None:
        """Close the file. Calling it again is harmless."""
        self._descriptor.close()


class JournalWriter:
    """Writer of one process's events to its segments; safe in threads and in signal handlers.

    A failed write loses only its event. Each loss is counted, and the first loss is logged. In a child of
    ``fork`` the writer does nothing, because the file is the parent's.

    The run's folder, ``directory``, exists. ``begun_us`` is the start of the run, Unix time in microseconds.
    A new segment begins at ``segment_bytes`` bytes. `Backpressure` describes ``limit``.

    Raises:
        UnwritableDirectoryError: The first segment can't be created.
    """

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        role: Role,
        begun_us: int,
        initial_step: int = 0,
        segment_bytes: int = 16 * 1024**2,
        limit: int | None = None,
        diagnostics: Diagnostics,
    ) -> None:
        self._segment_bytes = segment_bytes
        self._backpressure = Backpressure(directory, limit, diagnostics)
        self._encode = msgspec.json.Encoder().encode
        # Reentrant, because a signal handler can append an event while its thread holds the lock.
        self._lock = threading.RLock()
        self._generation = processes.generation
        self._seq = self._size = 0
        self._closed = False
        self._header = Header(
            run=run,
            begun_us=begun_us,
            role=role,
            process=ProcessIdentity.own(),
            segment=1,
            initial_step=initial_step,
        )
        try:
            self._output = SegmentOutput(
                directory, self._header, diagnostics, self._backpressure.measure, segment_bytes
            )
        except OSError as error:
            raise UnwritableDirectoryError(
                f"can't write the journal in {directory}: {error.strerror}; "
                "pass dir=… or set MEMLOG_DIR to a folder that can be written"
            ) from error

    @property
    def queued(self) -> bool:
        """True while writes go through a queue, because the file system is slow."""
        return self._output.queued

    @property
    def bindings(self) -> dict[str, Binding]:
        """The tracker's run to which newly written events belong, by backend."""
        return self._header.bindings

    def append(self, event: Event) -> int:
        """Write ``event`` and return its number; -1 if it is dropped or the writer is closed."""
        if processes.generation != self._generation:
            return -1
        with self._lock:
            if self._closed:
                return -1
            if self._backpressure.active and not self._backpressure.admits(event):
                return -1
            # Increased before the write: if the write fails, readers see a gap and count a lost event.
            seq, self._seq = self._seq, self._seq + 1
            line = self._encode(Record(seq, event)) + b"\n"
            size = len(line)
            self._size += size
            output = self._output
            mapped = output.mapped
            if mapped is not None and output.unchecked < CHECK_EVERY - 1:
                # What `SegmentOutput.write` and `MappedFile.write` do then, without their calls.
                output.unchecked += 1
                at = mapped.at  # no call from here until the position is stored, as there
                end = at + size
                if end <= mapped.limit:
                    mapped.view[at:end] = line
                    mapped.at = end
                else:
                    try:
                        mapped.write(line, event)
                    except OSError as error:
                        output.lose(error, mapped, line, event)
            else:
                output.write(line, event)
            if self._size >= self._segment_bytes:
                self._begin_segment(self._header)
            return seq

    def bind(self, backend: str, binding: Binding) -> None:
        """Begin a new segment. The segment's events belong to ``binding``, which is a run in ``backend``."""
        with self._lock:
            if self._closed:
                return
            bindings = {**self._header.bindings, backend: binding}
            self._begin_segment(msgspec.structs.replace(self._header, bindings=bindings))

    def close(self) -> None:
        """End the journal of this process. Calling it again is harmless."""
        with self._lock:
            if self._closed or processes.generation != self._generation:
                return
            self._closed = True
            # Inside the lock, so that no other thread writes an event after the close: the descriptor may
            # then belong to another file.
            self._output.close()

    def _begin_segment(self, header: Header) -> None:
        self._header = msgspec.structs.replace(header, segment=self._header.segment + 1)
        self._size = 0
        self._output.begin_segment(self._header)
