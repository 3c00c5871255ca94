"""memlog's own event file in a log folder. memlog writes each value to it only once.

TensorBoard only appends to its files. It can't replace or delete a value. So memlog first reads the values
that its file already has, and does not write them again. memlog also cuts off a record that an earlier
process could not complete.
"""

from __future__ import annotations

import io
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from memlog.sink import USERS_NUMBER

_VERSION = "brain.Event:2"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_LENGTH, _CHECK = struct.Struct("<Q"), struct.Struct("<I")


class Scalar(NamedTuple):
    """A value with its position on TensorBoard's two axes: step and time."""

    step: int
    seconds: float
    """Unix time."""
    value: Any
    """A ``Summary.Value``."""


class EventFile:
    """An event file. Only one process at a time writes to it.

    Args:
        path: The file. Its folder must exist. The first `append` creates the file.

    Attributes:
        path: The file's path.
        texts: The texts in the file, by tag. Each text is a list of strings.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[str, list[list[bytes]]] = {}
        self._own_steps: list[int] = []
        self._users_numbers: list[int] = []
        """memlog's steps with a number of the user's in the file (`memlog.sink.USERS_NUMBER`), and these."""
        self._stored: set[int] = set()
        self._size = -1

    def append(self, entries: Iterable[Scalar]) -> None:
        """Write the values that the file does not have yet, and flush them to the disk.

        Raises:
            OSError: the file can't be written. The caller can pass the same values again.
        """
        with os.fdopen(os.open(self.path, _FLAGS, 0o666), "r+b") as file:
            if os.fstat(file.fileno()).st_size != self._size:
                self._read_back(file)
            new = list(self._missing(entries))
            if new:
                self._write(file, _events(new, is_first=self._size == 0))
        self._note(new)

    def number_of(self, step: int) -> int:
        """Return the number of one of memlog's steps on the axis of the user's numbers."""
        place = bisect_right(self._own_steps, step) - 1
        return step if place < 0 else self._users_numbers[place] + step - self._own_steps[place]

    def move(self, path: Path) -> None:
        """Give the file another name in its folder, which must not exist."""
        self.path.rename(path)
        self.path = path

    def _missing(self, entries: Iterable[Scalar]) -> Iterator[Scalar]:
        taken: set[int] = set()
        for entry in entries:
            key = _key(entry)
            if key not in self._stored and key not in taken:
                taken.add(key)
                yield entry

    def _note(self, entries: Iterable[Scalar]) -> None:
        for entry in entries:
            self._stored.add(_key(entry))
            if entry.value.tag == USERS_NUMBER:
                own = round(entry.value.simple_value)
                place = bisect_right(self._own_steps, own)
                self._own_steps.insert(place, own)
                self._users_numbers.insert(place, entry.step)
            if entry.value.tensor.string_val:
                self.texts.setdefault(entry.value.tag, []).append(
                    list(entry.value.tensor.string_val)
                )

    def _read_back(self, file: io.BufferedRandom) -> None:
        """Read the file's records. Cut the file before the first incomplete or damaged record."""
        self._stored.clear()
        self.texts.clear()
        self._own_steps.clear()
        self._users_numbers.clear()
        end = 0
        for record in records(file):
            event = Event.FromString(record)
            self._note(Scalar(event.step, event.wall_time, v) for v in event.summary.value)
            end = file.tell()
        file.truncate(end)
        self._size = end

    def _write(self, file: io.BufferedRandom, events: Iterable[Any]) -> None:
        buffer = io.BytesIO()
        records = RecordWriter(buffer)
        for event in events:
            records.write(event.SerializeToString())
        file.seek(self._size)
        try:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            self._size = -1  # the file may have only a part of the data, so it is read again
            raise
        self._size += len(buffer.getbuffer())


def records(file: io.BufferedIOBase) -> Iterator[bytes]:
    """Yield the data of a file's records, up to the first incomplete or damaged record.

    A record is a length, the length's checksum, the data, and the data's checksum.
    """
    file.seek(0)
    while True:
        header = file.read(_LENGTH.size + _CHECK.size)
        if len(header) < _LENGTH.size + _CHECK.size or not _is_intact(header):
            return
        (length,) = _LENGTH.unpack_from(header)
        data = file.read(length + _CHECK.size)
        if len(data) < length + _CHECK.size or not _is_intact(data):
            return
        yield data[:length]


def _is_intact(checked: bytes) -> bool:
    content, check = checked[: -_CHECK.size], checked[-_CHECK.size :]
    return bool(masked_crc32c(content) == _CHECK.unpack(check)[0])


def _key(entry: Scalar) -> int:
    # Without the step: a value that is sent again may get another number of the user's (`USERS_NUMBER`).
    return hash((entry.seconds, entry.value.SerializeToString(deterministic=True)))


def _events(entries: Iterable[Scalar], *, is_first: bool) -> Iterator[Any]:
    """Yield events. Consecutive values with the same step and time share an event.

    Args:
        entries: The values, at least one.
        is_first: True if the file is empty. An event with the file format's version then comes first.
    """
    event = None
    for entry in entries:
        if event is None or (event.step, event.wall_time) != (entry.step, entry.seconds):
            if event is not None:
                yield event
            elif is_first:
                # TensorBoard takes a run's start from this event.
                yield Event(wall_time=entry.seconds, file_version=_VERSION)
            event = Event(step=entry.step, wall_time=entry.seconds)
        event.summary.value.append(entry.value)
    yield event
