"""Append events to the journal, from the trainer's thread."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from memlog._internal import fork
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import UnwritableDirectoryError
from memlog.events import Event
from memlog.journal.backpressure import Backpressure
from memlog.journal.format import Binding, Header, ProcessIdentity, Record, Role
from memlog.journal.segment_output import CHECK_EVERY, SegmentOutput


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
