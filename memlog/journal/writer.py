"""Appending to the journal, from the trainer's thread."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from memlog._internal import fork
from memlog._internal.descriptors import Descriptor
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.signals import raised_by_handler
from memlog.errors import UnwritableDirectoryError
from memlog.events import Batch, Event
from memlog.journal.backpressure import Room
from memlog.journal.disk import Disk
from memlog.journal.format import Binding, Header, ProcessIdentity, Record, Role, segment_name
from memlog.journal.queue import WriteQueue

Put: TypeAlias = Callable[[int, bytes], int]

CHECK_EVERY = 200
"""Events between looks at whether the file is still there."""
TRY_AGAIN_S = 5.0
"""Seconds on a queue after which a write tries whether the disk is fast again; twice as many each time."""
TRY_AGAIN_AT_LAST_S = 320.0


class JournalWriter:
    """Appends one process's events to its segments; safe under threads and in signal handlers.

    A write that fails costs that event alone: it is counted, and said once. In a child of ``fork`` the
    writer does nothing: the file is the parent's.

    Args:
        directory: The run's folder, which exists.
        run: The run's id.
        role: Which of the run's processes writes.
        begun_us: When the run began, Unix time in microseconds.
        initial_step: Where the run's step axis begins.
        segment_bytes: Size at which a new segment begins.
        limit: Bytes that the run's journal may take. The helper process keeps it; while the journal is
            half as large again, only steps with a peak are written, and the others counted.
        diagnostics: Where losses are counted.

    Raises:
        UnwritableDirectoryError: the first segment can't be created.
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
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._room = Room(directory, limit, diagnostics)
        self._diagnostics = diagnostics
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.RLock()
        self._generation = fork.generation
        self._seq = self._size = 0
        self._disk = Disk()
        self._unchecked = 0
        self._gone = False
        self._queue: WriteQueue | None = None
        self._try_at, self._try_after = 0.0, TRY_AGAIN_S
        self._closed = False
        self.newest_step: Batch | None = None
        """The last step's event that was written, or counted as lost."""
        self._header = Header(
            run=run,
            begun_us=begun_us,
            role=role,
            process=ProcessIdentity.own(),
            segment=1,
            initial_step=initial_step,
        )
        try:
            self._file = _SegmentFile()
            self._file.begin(directory, self._first_line(), self._header)
        except OSError as error:
            raise UnwritableDirectoryError(
                f"can't write the journal in {directory}: {error.strerror}; "
                "pass dir=… or set MEMLOG_DIR to a folder that can be written"
            ) from error

    @property
    def published(self) -> int:
        """Number of events appended so far."""
        return self._seq

    @property
    def queued(self) -> bool:
        """Whether writing goes through a queue now, because the file system is slow."""
        return self._queue is not None

    @property
    def bindings(self) -> dict[str, Binding]:
        """The trackers' runs that events belong to now, by backend."""
        return self._header.bindings

    def append(self, event: Event) -> int:
        """Writes ``event`` and returns its number; -1 where it finds no room, or the writer is closed."""
        if fork.generation != self._generation:
            return -1
        with self._lock:
            if self._closed:
                return -1
            if not self._room.scarce:
                return self._append(event)
            seq = -1
            for allotted in self._room.allot(event):
                number = self._append(allotted)
                seq = number if allotted is event else seq
        return seq

    def _append(self, event: Event) -> int:
        seq, file = self._seq, self._file
        end = file.size
        try:
            self._write_record(seq, event)
        except BaseException as error:
            if isinstance(error, Exception) and not raised_by_handler(error):
                raise
            if self._queue is None and self._file is file and file.ends_at(end):
                self._write_record(seq, event)
            raise
        finally:
            if isinstance(event, Batch):
                self.newest_step = event
        return seq

    def _write_record(self, seq: int, event: Event) -> None:
        self._seq = seq + 1
        line = self._encoder.encode(Record(seq, event)) + b"\n"
        self._size += len(line)
        if self._queue is not None and not self._returns():
            self._queue.put(partial(self._write, line))
        else:
            self._write(line, self._disk.write)
            if self._disk.is_slow:
                self._move_to_queue()
        if self._size >= self._segment_bytes:
            self._begin_segment(self._header)

    def _append_held(self) -> None:
        """What was held back for want of room comes before what is new."""
        for event in self._room.take_held():
            self._append(event)

    def bind(self, backend: str, binding: Binding) -> None:
        """Events from now on belong to ``binding`` in ``backend``: they go to a new segment."""
        with self._lock:
            if self._closed:
                return
            self._append_held()
            bindings = {**self._header.bindings, backend: binding}
            self._begin_segment(msgspec.structs.replace(self._header, bindings=bindings))

    def close(self) -> None:
        """Ends the journal of this process. Calling it again is harmless."""
        with self._lock:
            if self._closed or fork.generation != self._generation:
                return
            self._append_held()
            self._closed = True
            # Inside the lock: another thread's event must not go to a number that has become another file's.
            if self._queue is None or self._queue.close():
                if self._file.is_there():
                    self._count_what_went_elsewhere(self._unchecked)
                self._file.close()
            else:
                self._diagnostics.drop(
                    "journal_queue_full",
                    "the disk was too slow for the journal's last events",
                    # Its end waits there too, and stands for the write that is under way.
                    count=self._queue.waiting(),
                )

    def _first_line(self) -> bytes:
        return self._encoder.encode(self._header) + b"\n"

    def _begin_segment(self, header: Header) -> None:
        self._header = msgspec.structs.replace(header, segment=self._header.segment + 1)
        self._size = 0
        switch = partial(self._switch_file, self._first_line(), self._header)
        if self._queue is not None:
            self._queue.put_always(switch)
        else:
            switch()

    def _switch_file(self, first_line: bytes, header: Header) -> None:
        file = _SegmentFile()
        try:
            file.begin(self._directory, first_line, header)
        except OSError as error:
            if raised_by_handler(error):
                raise
            if not self._file.is_there():
                self._gone = True
            else:
                self._diagnostics.count_fault(
                    f"beginning the journal's next segment: {type(error).__name__}"
                )
                self._diagnostics.say_once(
                    "journal_write",
                    f"the journal in {self._directory} can't go on in a new file: {error.strerror}; it goes "
                    "on in the old one as long as that can be written (how many events are lost, if any, "
                    "is said at the end)",
                )
            return  # goes on in the old one, rather than lose events
        finally:
            if (
                file.has_begun
            ):  # a signal handler may raise right after that: readers take the old one for full
                # In this order: once it is closed, the old number may be a file of the user's.
                old, self._file = self._file, file
                old.close()
        self._room.look()

    def _write(self, line: bytes, put: Put = os.write) -> None:
        self._unchecked += 1
        if self._unchecked >= CHECK_EVERY or self._gone:
            self._check_that_it_is_there()
        if self._gone:
            return
        try:
            self._file.write(line, put)
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._diagnostics.drop(
                "journal_write",
                f"an event could not be written to {self._directory}: {error.strerror}; training goes "
                "on without it (make room there; how many are lost is said at the end)",
            )

    def _check_that_it_is_there(self) -> None:
        """What goes to a deleted file nobody will ever read, nor what went to another in its place."""
        unseen, self._unchecked = self._unchecked, 0
        if not self._gone and self._file.is_there():
            self._count_what_went_elsewhere(unseen - 1)  # one of them is still to be written
            return
        self._gone = True
        self._diagnostics.drop(
            "journal_gone",
            f"the journal in {self._directory} was deleted; training goes on without it (how many "
            "events are lost is said at the end)",
            count=unseen,
        )

    def _count_what_went_elsewhere(self, unseen: int) -> None:
        if not self._file.is_whole():
            self._diagnostics.drop(
                "journal_write",
                f"the journal in {self._directory} was closed by this program, and is open again (how many "
                "events are lost, at most, is said at the end)",
                count=unseen,
            )

    def _move_to_queue(self) -> None:
        self._queue = WriteQueue(self._diagnostics)
        self._try_at = time.monotonic() + self._try_after
        self._try_after = min(self._try_after * 2, TRY_AGAIN_AT_LAST_S)
        self._diagnostics.say_once(
            "slow_disk",
            f"writing to {self._directory} is slow (over 1 ms a write), so it moved to a background "
            "queue until it is fast again: a crash meanwhile may lose the newest events (set MEMLOG_DIR "
            "to a local disk)",
        )

    def _returns(self) -> bool:
        """Leaves the queue now and then, once nothing waits there: one slow write leads back to it."""
        queue = self._queue
        if queue is None or time.monotonic() < self._try_at or not queue.is_idle:
            return False
        queue.end()
        self._queue = None
        self._disk.try_again()
        return True


class _SegmentFile:
    """One segment, open for appending."""

    def __init__(self) -> None:
        self._path = Path()
        self._descriptor: Descriptor | None = None
        self._fd = -1
        self._torn = False
        self.size = 0
        self.has_begun = False

    def begin(self, directory: Path, first_line: bytes, header: Header) -> None:
        """Makes the file; where that fails, or a signal handler raises meanwhile, there is none."""
        self._path = directory / segment_name(f"{header.role}-{header.process.pid}", header.segment)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptor = Descriptor(os.open(self._path, flags, 0o644))
            self._fd = self._descriptor.number
            self.write(first_line)
        except FileExistsError:
            raise
        except BaseException:
            self.close()
            with suppress(OSError):
                self._path.unlink()  # a segment without a header is none
            raise
        self.has_begun = True

    def write(self, line: bytes, put: Put = os.write) -> None:
        """One ``write(2)``, by ``put``; after one that stopped midway the next begins on its own line."""
        data = b"\n" + line if self._torn else line
        try:
            written = put(self._fd, data)
        except OSError as error:
            if error.errno != errno.EBADF or not self.is_there():
                raise
            written = put(self._fd, data)
        self.size += written
        self._torn = written < len(data)
        if self._torn:
            raise OSError(None, "the disk is full")

    def ends_at(self, size: int) -> bool:
        """Whether nothing was written since it had this size, whatever this process came to know of it."""
        status = self._status()
        return status is not None and status.st_size == size

    def is_there(self) -> bool:
        """Whether what is written can be read; where the program has closed it, it is opened again."""
        status = self._status() or self._open_again()
        return status is not None and status.st_nlink > 0

    def is_whole(self) -> bool:
        """Whether it has all that was written; what went to a number that is another's is counted once."""
        status = self._status()
        if status is None or status.st_size >= self.size:
            return True
        self.size = status.st_size
        return False

    def close(self) -> None:
        descriptor, self._descriptor, self._fd = self._descriptor, None, -1
        if descriptor is not None:
            descriptor.close()

    def _status(self) -> os.stat_result | None:
        return None if self._descriptor is None else self._descriptor.status()

    def _open_again(self) -> os.stat_result | None:
        before = self._descriptor
        if before is None:
            return None
        try:
            again = Descriptor(
                os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            )
        except OSError:  # it is gone
            return None
        status = again.status()
        if status is None or not before.stands_for(status):  # another file has its name now
            again.close()
            return None
        self._descriptor, self._fd = again, again.number
        return status
