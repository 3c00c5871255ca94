"""Protocol of the training process and its helper process: messages, requests, alerts, and settled runs.

Credentials are passed through this pipe only: never on a command line, never on a disk.

What must happen inside the training process, the helper asks for: the search for what holds memory, calls of
``on_alert``, printed lines. The training process compares one word at each step (`RequestReader.words`), and
never waits. The memory belongs to no file of a disk, so a full or hanging disk stops no request, and what
was written survives the death of either process while the other lives.

The memory begins with words of eight bytes (`_WRITTEN`, `_READ`, `_STATE`). A ring of bytes follows. Each
request is one line of JSON in it. The helper stores the line first, and then the number of bytes written so
far. Only the training process stores the number of bytes read so far. If the ring is full, the helper keeps
the request and tries again later.

A thread in the training process reads the pipe, and sleeps until data arrives. The pipe serves only the
console and the user's callback, because the journal has these alerts already.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import Descriptor
from memlog.events import Alert, End, Event, Health
from memlog.journal import RunDirectory
from memlog.ranks.registration import Registration
from memlog.settings import Settings
from memlog.sink import Connection, TrackerRun

NO_JOURNAL = 4
"""Exit code of a helper that can't create its journal, as on a full disk."""
SETTLED = "helper-settled"
"""Name of a file in a run's folder: the number of the last `Settle` message that the helper has handled."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message: the run and its settings."""

    run_directory: str
    begun_us: int
    trainer_pid: int
    settings: Settings
    alerts_fd: int | None = None
    """Descriptor of the pipe for the helper's alerts; ``None``: the trainer does not read them."""
    requests_fd: int | None = None
    """Descriptor of the memory for requests to the trainer, which has the same number in both processes;
    ``None``: there is no such memory."""
    again: bool = False
    """True if this helper replaces one that ended too early."""
    registration: Registration | None = None
    """The run's position among the ranks; ``None``: the run trains alone, or its rank is not known yet."""


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Connection that a tracker's client in the training process uses."""

    backend: str
    connection: Connection


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The user's run to which all later events belong."""

    backend: str
    run: TrackerRun
    in_process: bool = False
    """True if the training process writes to the run. The run's address then has no user and password."""
    offset: int = 0
    """`memlog.journal.Binding.offset` of the run."""


class Ranked(msgspec.Struct, frozen=True, tag="ranked"):
    """Message that tells the run's rank, if the rank was unknown when the run began."""

    registration: Registration


class Lead(msgspec.Struct, frozen=True, tag="lead"):
    """Message that tells the helper to deliver the run, because no lower rank has a run."""

    backends: tuple[str, ...]
    """Trackers in which memlog opens a run."""
    name: str | None
    """Name of the run that memlog opens; ``None``: the tracker chooses one."""


class JudgeNow(msgspec.Struct, frozen=True, tag="judge_now"):
    """Message that wakes the helper, because the trainer waits for the judgement of the steps so far."""


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Message that a run of the user's begins to end, while memlog's run may go on.

    The helper process publishes what it still knows of the steps so far, and the run's report. After that it
    writes ``number`` to the file `SETTLED`.
    """

    number: int
    """Number of this message, counted from 1."""
    backend: str
    run_id: str
    """The tracker's id of the user's run."""
    end: End
    """How the user's run ends."""
    in_process: bool
    """True if the training process writes to the run. Otherwise an uploader delivers to the run."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The last message: the run is over. The helper process then delivers the remaining data."""

    end: End
    """The run's end. The journal lacks it if the disk was full."""
    health: Health
    """The trainer's last health event. The journal lacks it if the disk was full."""


Message: TypeAlias = Begin | Connect | Join | Ranked | Lead | JudgeNow | Settle | Finish

encode = msgspec.json.Encoder().encode


def decode(line: bytes) -> Message:
    """Decode one message.

    Raises:
        msgspec.MsgspecError: the line is no message.
    """
    message: Message = msgspec.json.decode(line, type=Message)
    return message


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


_encode_request = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(Request).decode


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
        # Not earlier: from now on, the helper can overwrite these bytes.
        self.words[_READ] = self.seen
        requests = []
        for line in data[:whole].split(b"\n")[:-1]:
            with suppress(msgspec.MsgspecError):
                requests.append(_decode_request(line))
        return requests

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
        self._waiting.append(
            _encode_request(Request(kind, msgspec.Raw(_encode_request(body)))) + b"\n"
        )
        self.flush()

    def flush(self) -> None:
        """Write the requests that wait for room."""
        while self._waiting and self._words is not None and self._map is not None:
            line, written = self._waiting[0], self._words[_WRITTEN]
            # Such a line would never fit.
            if len(line) > _RING:
                self._waiting.popleft()
                continue
            if written + len(line) - self._words[_READ] > _RING:
                return
            begin = _WORDS + written % _RING
            head = line[: SIZE - begin]
            self._map[begin : begin + len(head)] = head
            self._map[_WORDS : _WORDS + len(line) - len(head)] = line[len(head) :]
            # Stored last, so that the reader sees only whole lines.
            self._words[_WRITTEN] = written + len(line)
            self._waiting.popleft()


def writer_for(descriptor: int | None) -> RequestWriter:
    """Return a writer for the memory with this descriptor. If it can't be mapped, requests are dropped."""
    try:
        # The program may have closed the memory's descriptor, so that a file of its own has the number.
        if descriptor is None or not _is_shared_memory(descriptor):
            return RequestWriter(None)
        return RequestWriter(descriptor)
    except (OSError, ValueError):
        return RequestWriter(None)


def _is_shared_memory(descriptor: int) -> bool:
    if not hasattr(os, "memfd_create"):
        return True
    return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(f"/memfd:{_NAME}")


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


_decode_alert = msgspec.json.Decoder(Alert).decode


class AlertListener:
    """Reader of the pipe, in the training process. It calls ``on_alert`` on its own thread.

    Attributes:
        fd: Descriptor to pass to the helper process; `start` closes it in this process.

    Raises:
        OSError: the pipe can't be created.
    """

    def __init__(self, on_alert: Callable[[Alert], object], diagnostics: Diagnostics) -> None:
        self._on_alert = on_alert
        self._diagnostics = diagnostics
        ours, theirs = os.pipe()
        self._ours, self._theirs = Descriptor(ours), Descriptor(theirs)
        self.fd = self._theirs.number

    def another(self) -> AlertListener:
        """Return a new listener with the same callback, for another helper."""
        return AlertListener(self._on_alert, self._diagnostics)

    def start(self, on_closed: Callable[[], object]) -> None:
        """Start the listener's thread. The thread ends when the helper ends.

        ``on_closed`` is called on the listener's thread when the helper has closed its end of the pipe.

        Raises:
            RuntimeError: the thread can't be started. Both ends of the pipe are then closed.
        """
        self._theirs.close()
        try:
            threading.Thread(
                target=self._listen, args=(on_closed,), name="memlog-alerts", daemon=True
            ).start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close both ends of the pipe. Call it only if the listener's thread does not run."""
        self._theirs.close()
        self._ours.close()

    def _listen(self, on_closed: Callable[[], object]) -> None:
        unfinished = b""
        with self._diagnostics.contained("listening for the helper process's alerts"):
            while data := os.read(self._ours.number, 65536):
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    with self._diagnostics.contained("an alert of the helper process"):
                        self._on_alert(_decode_alert(line))
        self._ours.close()
        with self._diagnostics.contained("looking for the helper process"):
            on_closed()


def alert_sender(fd: int) -> Callable[[Event], None]:
    """Return a subscriber that writes alerts to the pipe. It does not wait for the trainer to read them."""
    os.set_blocking(fd, False)
    encode = msgspec.json.Encoder().encode

    def send(event: Event) -> None:
        if isinstance(event, Alert):
            try:
                os.write(fd, encode(event) + b"\n")
            except OSError as error:  # the trainer has ended, or does not read
                import logging  # noqa: PLC0415 - the training process needs it not

                logger = logging.getLogger("memlog.delivery")
                logger.warning("an alert could not be sent to the trainer: %s", error)

    return send


SETTLED_WITHIN = 1.0
"""Maximum seconds by which memlog delays the end of a user's run."""
_FOR_WRITING = 0.2
"""Seconds of `SETTLED_WITHIN` that are left to write the helper's results to the run."""
_POLL = 0.01


def settled_until() -> float:
    """Return when a run that begins to end now no longer waits for the helper, as `time.monotonic` does."""
    return time.monotonic() + SETTLED_WITHIN - _FOR_WRITING


class Settling:
    """The helper process's work for one `memlog.delivery.helper.protocol.Settle` message.

    ``has_no_helper`` returns True if no helper process runs that will do the work. ``end`` is how the user's
    run ends. ``until`` is the time of `settled_until` when the run began to end.
    """

    def __init__(
        self,
        run: RunDirectory,
        number: int,
        end: End,
        until: float,
        has_no_helper: Callable[[], bool],
    ) -> None:
        self.end = end
        self._until = until
        self._file = run.path / SETTLED
        self._number = number
        self._has_no_helper = has_no_helper

    def wait(self) -> None:
        """Wait until the helper is done, or can't be done in time."""
        while not (self._is_done() or self._has_no_helper() or time.monotonic() >= self._until):
            time.sleep(_POLL)

    def _is_done(self) -> bool:
        with suppress(OSError, ValueError):
            return int(self._file.read_text()) >= self._number
        return False
