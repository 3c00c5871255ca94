"""How far an uploader got: kept beside the journal, replaced whole, so that any other uploader goes on."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import msgspec

from memlog._internal.safe_files import open_plain, open_to_append, read_plain, replacing
from memlog.errors import DeliveryError
from memlog.events import Alert, Artifact
from memlog.journal import Binding, Position, RunDirectory
from memlog.journal.format import START, UNDECODABLE
from memlog.sink import Axis

MAX_ALERTS = 1000
"""Alerts of one run that a tracker shows at most."""

MAX_STATE = 64 * 1024**2
"""Bytes of the state of an uploader or an in-process writer; a larger file is not memlog's."""

_POLL = 0.1
"""Seconds between looks at a lock that another process holds."""

Stage: TypeAlias = Literal["waiting", "delivering", "unreachable", "done"]


class Progress(msgspec.Struct, frozen=True):
    """How far one process's segments have been delivered."""

    sent: Position = START
    """Every point that an event before here made final has been delivered."""
    resume: Position = START
    """Where reading must begin so that a fresh plan knows its open buckets; never after ``sent``."""
    open: dict[Axis, Position] | None = None
    """Where each axis's open bucket begins; an axis that is missing has none.

    Events before that are not fed again: were the one gone that closed a bucket (a journal that is too
    large is thinned), its points would be sent once more.
    """


class DeferredRange(msgspec.Struct, frozen=True):
    """Segments of one process that were passed over, since the tracker refuses the run that they go to."""

    process: str
    target: str | None
    """Id of the user's run; ``None``: the sink's own."""
    until: Position
    """Where the segments of another run begin."""
    progress: Progress = Progress()


class AlertsTold(msgspec.Struct):
    """The alerts of one of a tracker's runs."""

    alerts: list[Alert] = []
    """The newest `MAX_ALERTS`."""
    told: int = 0
    """How many of them the tracker has."""


class Outgoing(msgspec.Struct, frozen=True):
    """A file on its way to one of a tracker's runs."""

    target: str | None
    """Id of the user's run; ``None``: the sink's own."""
    artifact: Artifact


class Outbox(msgspec.Struct):
    """What a tracker is to get besides points; taken over from the journal with the position."""

    alerts: dict[str, AlertsTold] = {}
    """By the user's run id; ``""``: the sink's own run."""
    artifacts: list[Outgoing] = []


class UploadState(msgspec.Struct, kw_only=True):
    """What an uploader remembers of its run and backend."""

    backend: str
    stage: Stage = "waiting"
    problem: str | None = None
    """Why it is not delivering, in one line."""
    failed_attempts: int = 0
    """Attempts to deliver that failed, since the beginning."""
    address: str | None = None
    """Where the tracker is, without user and password, as the trainer's client had it."""
    own_run: Binding | None = None
    """The tracker's run that the sink opened itself."""
    joined: list[str] = []
    """Ids of the user's runs that points went to."""
    delivered: int = 0
    """Points handed over."""
    provisional: int = 0
    """Points handed over to a sink that has not made them safe yet; sent again after an unclean end."""
    dropped: dict[str, int] = {}
    """Points lost, by reason."""
    files: dict[str, Progress] = {}
    """By process."""
    held: dict[str, DeferredRange] = {}
    """What was passed over, by `held_name`, in the order in which it is to be delivered."""
    refused: dict[str, str] = {}
    """Why the tracker refuses a run, by the user's run id; ``""``: the sink's own run."""
    beside: list[str] = []
    """Ids of the user's runs in whose place runs of the sink's own get what is left."""
    outbox: Outbox = msgspec.field(default_factory=Outbox)

    def progress(self, place: str) -> Progress:
        """How far a process's segments are, or a stretch that was passed over is."""
        held = self.held.get(place)
        return self.files.get(place, Progress()) if held is None else held.progress

    def advance(self, place: str, progress: Progress) -> None:
        """Notes that they are so far."""
        held = self.held.get(place)
        if held is None:
            self.files[place] = progress
        else:
            self.held[place] = msgspec.structs.replace(held, progress=progress)

    def save(self, run: RunDirectory) -> None:
        """Replaces what was kept before; a crash leaves the one or the other, never half of one."""
        with replacing(run.path, _state_name(run, self.backend)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @staticmethod
    def load(run: RunDirectory, backend: str) -> UploadState:
        """What was kept; a fresh state where there is nothing that can be read."""
        try:
            kept = read_plain(run.path, _state_name(run, backend), MAX_STATE)
            return msgspec.json.decode(kept, type=UploadState)
        except (OSError, ValueError, *UNDECODABLE):
            return UploadState(backend=backend)


def held_name(process: str, segment: int) -> str:
    """What a stretch that begins with a segment goes by: no process has such a name."""
    return f"{process}@{segment}"


def read_states(run: RunDirectory) -> list[UploadState]:
    """What every uploader of a run remembers."""
    backends = sorted(path.stem for path in run.delivery.glob("*.json"))
    return [UploadState.load(run, backend) for backend in backends]


def _state_name(run: RunDirectory, backend: str) -> str:
    return f"{run.delivery.name}/{backend}.json"


class _Lock:
    """Held by one process alone; freed when it dies. A file system without locks lets everybody have it.

    Args:
        run: The run.
        name: The lock's file, below the run's folder.
    """

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run = run
        self._name = name
        self._file: BinaryIO | None = None

    def take(self) -> bool:
        """Takes it where nobody else holds it; says whether."""
        file = open_to_append(self._run.path, self._name)
        if not _locked(file, shared=False):
            file.close()
            return False
        self._file = file
        return True

    def free(self) -> None:
        """Gives it back."""
        if self._file is not None:
            self._file.close()


class UploadLock(_Lock):
    """Keeps a second uploader away from the same run and backend.

    Raises:
        DeliveryError: another uploader holds it.
    """

    def __init__(self, run: RunDirectory, backend: str) -> None:
        super().__init__(run, f"{run.delivery.name}/{backend}.lock")
        self._backend = backend

    def __enter__(self) -> None:
        """Takes the lock."""
        if not self.take():
            raise DeliveryError(
                f"run {self._run.id} is being delivered to {self._backend} by its own helper process: "
                "wait for it, `memlog show` says how far it is"
            )

    def __exit__(self, *_: object) -> None:
        """Frees it."""
        self.free()


class TakenOver(UploadLock):
    """An uploader's lock, for which the helper process of a run that is over makes way.

    Args:
        run: The run.
        backend: The backend's name.
        timeout: Seconds to wait for that at most.
        is_over: Whether the run is.

    Raises:
        DeliveryError: the run goes on, or the helper process has not made way.
    """

    def __init__(
        self, run: RunDirectory, backend: str, timeout: float, *, is_over: bool = True
    ) -> None:
        super().__init__(run, backend)
        self._timeout = timeout
        self._is_over = is_over
        self._wanted = _Lock(run, _wanted_name(run, backend))

    def __enter__(self) -> None:
        """Takes the lock, as soon as it is free."""
        deadline = time.monotonic() + self._timeout
        self._wanted.take()
        try:
            while not self.take():
                if not self._is_over:
                    raise DeliveryError(
                        f"run {self._run.id} goes on, and its own helper process delivers to "
                        f"{self._backend}: `memlog show {self._run.id}` says how far it is"
                    )
                if time.monotonic() >= deadline:
                    raise DeliveryError(
                        f"run {self._run.id} is being delivered to {self._backend} by its own helper "
                        f"process, which has not made way within {self._timeout:g} s: `memlog show "
                        f"{self._run.id}` says how far it is; call `memlog sync` again later"
                    )
                time.sleep(_POLL)
        finally:
            self._wanted.free()


def is_wanted(run: RunDirectory, backend: str) -> bool:
    """Whether another process waits for the place of the one that delivers."""
    return _is_held(run.path / _wanted_name(run, backend))


def _wanted_name(run: RunDirectory, backend: str) -> str:
    return f"{run.delivery.name}/{backend}.wanted"


class HelperLock(_Lock):
    """Held by a run's helper process as long as it lives, and by who does its work afterwards.

    As a context manager it says whether it was to be had: not while the helper lives, nor while an uploader
    of the run is at work.
    """

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run, "helper.lock")

    def __enter__(self) -> bool:
        """Takes the lock."""
        return self.take() and not any(map(_is_held, self._run.delivery.glob("*.lock")))

    def __exit__(self, *_: object) -> None:
        """Frees it."""
        self.free()


def _is_held(path: Path) -> bool:
    """Whether somebody holds the lock whose file that is."""
    try:
        with open_plain(path.parent, path.name) as file:
            return not _locked(file, shared=True)
    except OSError:
        return False


def _locked(file: BinaryIO, *, shared: bool) -> bool:
    """Locks an open file until it is closed; ``False`` where another process has it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks (some network ones): nothing to hold on to
    return True
