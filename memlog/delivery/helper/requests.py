"""Requests of the helper process to the training process, in memory that both map.

What must happen inside the training process, the helper asks for: the search for what holds memory, calls of
``on_alert``, printed lines. The training process compares one word at each step (`RequestReader.words`), and
never waits. The memory belongs to no file of a disk, so a full or hanging disk stops no request, and what
was written survives the death of either process while the other lives.

The memory begins with words of eight bytes (`_WRITTEN`, `_READ`, `_STATE`). A ring of bytes follows. Each
request is one line of JSON in it. The helper stores the line first, and then the number of bytes written so
far. Only the training process stores the number of bytes read so far. If the ring is full, the helper keeps
the request and tries again later.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from memlog._internal.processes import Descriptor

SIZE = 64 * 1024
_WORDS = 64
"""Bytes of the words at the beginning."""
_RING = SIZE - _WORDS
_WRITTEN, _READ, _STATE = range(3)
"""Indexes of the words: bytes written by the helper, bytes read by the training process, state of the run."""
_NAME = "memlog"
_MOST_KEPT = 1000
"""Maximum number of requests that wait for room in the ring. Older requests are dropped."""

RUNNING, JUDGED_HERE = 0, -1
"""States. The training process makes steps; it has judged the run itself, because the helper did not answer.
Any other state is the number of a judgement, counted from 1: the training process waits for it."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request. ``body`` is decoded by the part that handles requests of this ``kind``."""

    kind: str
    body: msgspec.Raw = msgspec.Raw(b"null")


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Request).decode


class RequestReader:
    """The training process's end. ``take`` is the function that handles new requests.

    Attributes:
        words: The words of the shared memory. A step compares the first one with `seen`.
        seen: Bytes that were read so far.
    """

    def __init__(self, take: Callable[[], object]) -> None:
        self.take: Callable[[], object] = take
        self._file = _shared_memory()
        self._map = mmap.mmap(self._file.number, SIZE)
        self.words = memoryview(self._map)[:_WORDS].cast("q")
        self.seen = 0

    @property
    def descriptor(self) -> int | None:
        """Descriptor of the memory, for a helper process; ``None`` if other code has closed it."""
        return None if self._file.status() is None else self._file.number

    @property
    def pending(self) -> bool:
        """True if there are requests that were not read."""
        return self.words[_WRITTEN] != self.seen

    def read(self) -> list[Request]:
        """Return the new requests. Skip a request that can't be decoded."""
        written = self.words[_WRITTEN]
        data = self._between(self.seen, written)
        whole = data.rfind(b"\n") + 1  # an incomplete line is read at the next call
        self.seen += whole
        self.words[_READ] = self.seen
        found = []
        for line in data[:whole].split(b"\n")[:-1]:
            with suppress(msgspec.MsgspecError):
                found.append(_decode(line))
        return found

    def tell(self, state: int) -> None:
        """Tell the helper the run's state."""
        self.words[_STATE] = state

    def close(self) -> None:
        """Give the memory back. The helper process keeps its own mapping. A second call is harmless."""
        self.take = _nothing  # ends a cycle of references, which would keep the helper's pipes open
        self.words.release()
        self._map.close()
        self._file.close()

    def _between(self, begin: int, end: int) -> bytes:
        if not 0 <= end - begin <= _RING:
            raise ValueError("the memory that is shared with the helper process is damaged")
        first, last = _WORDS + begin % _RING, _WORDS + end % _RING
        if first < last or begin == end:
            return self._map[first:last]
        return self._map[first:] + self._map[_WORDS:last]


class RequestWriter:
    """The helper process's end. Without ``descriptor``, requests are dropped.

    Raises:
        OSError: The memory can't be mapped.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._waiting: deque[bytes] = deque(maxlen=_MOST_KEPT)
        self._map = None if descriptor is None else mmap.mmap(descriptor, SIZE)
        self._words = None if self._map is None else memoryview(self._map)[:_WORDS].cast("q")

    @property
    def state(self) -> int:
        return RUNNING if self._words is None else self._words[_STATE]

    def write(self, kind: str, body: Any = None) -> None:
        """Write a request. If there is no room, keep it until a later call of `flush`."""
        self._waiting.append(_encode(Request(kind, msgspec.Raw(_encode(body)))) + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the requests that wait for room."""
        while self._waiting and self._words is not None and self._map is not None:
            line, written = self._waiting[0], self._words[_WRITTEN]
            if len(line) > _RING:
                self._waiting.popleft()
                continue
            if written + len(line) - self._words[_READ] > _RING:
                return
            begin = _WORDS + written % _RING
            head = line[: SIZE - begin]
            self._map[begin : begin + len(head)] = head
            self._map[_WORDS : _WORDS + len(line) - len(head)] = line[len(head) :]
            self._words[_WRITTEN] = written + len(line)
            self._waiting.popleft()


def writer_for(descriptor: int | None, trainer: int, *, is_inherited: bool) -> RequestWriter:
    """Return a writer for the memory of the training process ``trainer``.

    ``descriptor`` is that of the memory in this process if ``is_inherited``, otherwise in the training
    process. If the memory can't be mapped, requests are dropped.
    """
    if descriptor is None:
        return RequestWriter(None)
    try:
        if is_inherited:
            return RequestWriter(descriptor)
        path = Path(f"/proc/{trainer}/fd/{descriptor}")
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            return RequestWriter(None)  # the number belongs to another file of the training process
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return RequestWriter(opened)
        finally:
            os.close(opened)
    except (OSError, ValueError):
        return RequestWriter(None)


def _nothing() -> None:
    pass


def _shared_memory() -> Descriptor:
    """Return the descriptor of new memory of `SIZE` zero bytes."""
    # In one line: an interruption before the descriptor has an owner would leave it open.
    memory = Descriptor(os.memfd_create(_NAME) if hasattr(os, "memfd_create") else _unnamed_file())
    os.truncate(memory.number, SIZE)
    return memory


def _unnamed_file() -> int:
    import tempfile  # noqa: PLC0415 - not needed on Linux

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
