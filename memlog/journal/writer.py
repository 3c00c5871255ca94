"""Append events to the journal, from the trainer's thread.

On a slow file system, a background thread makes the system calls.
"""

from __future__ import annotations

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
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.fork import Descriptor
from memlog._internal.signals import raised_by_handler
from memlog.errors import UnwritableDirectoryError
from memlog.events import Batch, Event, readings
from memlog.journal.disk import Disk, WriteQueue
from memlog.journal.format import Binding, Header, ProcessIdentity, Record, Role, segment_name
from memlog.journal.mapped_file import DISK_FULL, WINDOW, MappedFile, can_map

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
        sizes = {each.name: each.peak for each in readings(event)}
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

        Lines that are not written after `memlog.journal.disk.CLOSE_TIMEOUT` seconds count as lost.
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
        self._lock = threading.RLock()
        self._generation = fork.generation
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
        if fork.generation != self._generation:
            return -1
        with self._lock:
            if self._closed:
                return -1
            if self._backpressure.active and not self._backpressure.admits(event):
                return -1
            # Increased before the write: if the write fails, readers see a gap and count a lost event.
            seq, self._seq = self._seq, self._seq + 1
            line = self._encode(Record(seq, event)) + b"\n"
            self._size += len(line)
            output = self._output
            mapped = output.mapped
            if mapped is not None and output.unchecked < CHECK_EVERY - 1:
                # What `SegmentOutput.write` does then, without a call.
                output.unchecked += 1
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
            if self._closed or fork.generation != self._generation:
                return
            self._closed = True
            # Inside the lock, so that no other thread writes an event after the close: the descriptor may
            # then belong to another file.
            self._output.close()

    def _begin_segment(self, header: Header) -> None:
        self._header = msgspec.structs.replace(header, segment=self._header.segment + 1)
        self._size = 0
        self._output.begin_segment(self._header)
