"""Saved states of uploaders and in-process writers, and locks between them.

Some trackers (W&B) let only the training process write to the user's run. Then the uploader, in another
process, skips the events of that run. memlog never writes to a run that the user has finished. If such a run
lacks data, ``memlog sync`` opens another run in the tracker and delivers everything to it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import msgspec

from memlog._internal.safe_files import open_plain, open_to_append, read_plain, replacing
from memlog.errors import DeliveryError
from memlog.events import Alert, Artifact, End
from memlog.journal import Binding, Position, RunDirectory
from memlog.journal.format import START, UNDECODABLE
from memlog.sink import Axis

MAX_ALERTS = 1000
"""Maximum number of alerts of one run that a tracker shows. If there are more, it shows the newest ones."""

MAX_STATE = 64 * 1024**2
"""Maximum bytes of the saved state of an uploader or an in-process writer. A larger file is not memlog's."""

_POLL = 0.1
"""Seconds between attempts to take a lock that another process holds."""

Stage: TypeAlias = Literal["waiting", "delivering", "unreachable", "done"]


class Progress(msgspec.Struct, frozen=True):
    """Progress of the delivery of one process's segments."""

    sent: Position = START
    """Position in the journal. All earlier points are delivered, except points that are not final yet."""
    resume: Position = START
    """Position from which a new uploader reads again, to restore the open buckets of its plan (see
    `memlog.metrics.Plan`). The position is never after ``sent``."""
    open: dict[Axis, Position] | None = None
    """Position of the first event in each axis's open bucket. An axis without an open bucket is missing.

    A new uploader ignores the axis's events before this position, because their points were already sent.
    """


class DeferredRange(msgspec.Struct, frozen=True):
    """Segments of one process whose delivery is put off, because the tracker refuses their run."""

    process: str
    target: str | None
    """Id of the user's run; ``None``: the sink's own run."""
    until: Position
    """End of the range: the position at which the segments of another run begin."""
    progress: Progress = Progress()


class RunAlerts(msgspec.Struct):
    """Alerts for one run in a tracker."""

    alerts: list[Alert] = []
    """The newest alerts, at most `MAX_ALERTS`."""
    sent: int = msgspec.field(default=0, name="told")
    """Number of these alerts that the tracker has; named ``told`` in the file, as in earlier versions."""


class Outgoing(msgspec.Struct, frozen=True):
    """File to upload to one run in a tracker."""

    target: str | None
    """Id of the user's run; ``None``: the sink's own run."""
    artifact: Artifact


class Outbox(msgspec.Struct):
    """Alerts and files to upload; saved together with the position in the journal."""

    alerts: dict[str, RunAlerts] = {}
    """Alerts by the id of the user's run. The id ``""`` means the sink's own run."""
    artifacts: list[Outgoing] = []


class UploadState(msgspec.Struct, kw_only=True):
    """State of the uploader that delivers one run to one backend."""

    backend: str
    stage: Stage = "waiting"
    problem: str | None = None
    """Reason why data is not delivered, in one line."""
    failed_attempts: int = 0
    """Number of failed attempts to deliver data, since the run began."""
    address: str | None = None
    """Address, without user and password, that the trainer's client used for the tracker."""
    own_run: Binding | None = None
    """The tracker's run that the sink opened itself."""
    continued_by: str | None = None
    """memlog's id of the run that continues ``own_run`` after a restart of the training."""
    joined: list[str] = []
    """Ids of the user's runs to which points were sent."""
    delivered: int = 0
    """Number of points delivered."""
    provisional: int = 0
    """Number of sent points that the sink may still lose. They are sent again if this uploader dies."""
    dropped: dict[str, int] = {}
    """Number of points lost, by reason."""
    files: dict[str, Progress] = {}
    """Progress in each process's segments, by process."""
    deferred: dict[str, DeferredRange] = msgspec.field(default_factory=dict, name="held")
    """Deferred ranges by `deferred_key`, in the order of delivery; named ``held`` in the file, as in earlier
    versions."""
    refused: dict[str, str] = {}
    """Reason why the tracker refuses a run, by the user's run id. The id ``""`` means the sink's own run."""
    beside: list[str] = []
    """Ids of the user's runs whose remaining points go to a run that the sink opens."""
    outbox: Outbox = msgspec.field(default_factory=Outbox)
    ended: End | None = None
    """How the run ended, as the tracker knows it; ``None`` if the tracker does not know it yet."""

    def progress(self, key: str) -> Progress:
        """Return the progress of a process's segments or of a deferred range.

        ``key`` is the process's name or the range's `deferred_key`.
        """
        deferred = self.deferred.get(key)
        return self.files.get(key, Progress()) if deferred is None else deferred.progress

    def advance(self, key: str, progress: Progress) -> None:
        deferred = self.deferred.get(key)
        if deferred is None:
            self.files[key] = progress
        else:
            self.deferred[key] = msgspec.structs.replace(deferred, progress=progress)

    def save(self, run: RunDirectory) -> None:
        """Replace the saved state atomically. After a crash, the whole old or the whole new state exists."""
        with replacing(run.path, _state_name(run, self.backend)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @staticmethod
    def load(run: RunDirectory, backend: str) -> UploadState:
        """Return the saved state; a new one if none can be read."""
        try:
            kept = read_plain(run.path, _state_name(run, backend), MAX_STATE)
            return msgspec.json.decode(kept, type=UploadState)
        except (OSError, ValueError, *UNDECODABLE):
            return UploadState(backend=backend)


def deferred_key(process: str, segment: int) -> str:
    """Return the key of a deferred range in `UploadState.deferred`. The range begins with ``segment``.

    A key never equals a process's name. So `UploadState.progress` accepts both keys and names.
    """
    return f"{process}@{segment}"


def read_states(run: RunDirectory) -> list[UploadState]:
    backends = sorted(path.stem for path in run.delivery.glob("*.json"))
    return [UploadState.load(run, backend) for backend in backends]


def _state_name(run: RunDirectory, backend: str) -> str:
    return f"{run.delivery.name}/{backend}.json"


class _Lock:
    """Lock on the file ``name`` in a run's folder. A process holds the lock until it frees it or dies.

    On a file system without locks every process gets the lock.
    """

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run = run
        self._name = name
        self._file: BinaryIO | None = None

    def __exit__(self, *_: object) -> None:
        self.free()

    def take(self) -> bool:
        """Take the lock; return False if another process holds it."""
        file = open_to_append(self._run.path, self._name)
        if not _locked(file, shared=False):
            file.close()
            return False
        self._file = file
        return True

    def free(self) -> None:
        if self._file is not None:
            self._file.close()


class UploadLock(_Lock):
    """Lock that lets one uploader at a time deliver a run to a backend.

    Raises:
        DeliveryError: Another uploader holds the lock.
    """

    def __init__(self, run: RunDirectory, backend: str) -> None:
        super().__init__(run, f"{run.delivery.name}/{backend}.lock")
        self._backend = backend

    def __enter__(self) -> None:
        if not self.take():
            raise DeliveryError(
                f"run {self._run.id} is being delivered to {self._backend} by its own helper process: "
                f"wait for it; `{self._run.command('show')}` prints its progress"
            )


class TakenOver(UploadLock):
    """An uploader's lock that this process takes over from the helper process of a finished run.

    This process asks the helper process to release the lock, and waits for the release.

    Raises:
        DeliveryError: The run is not over, or the helper process did not release the lock within ``timeout``
            seconds.
    """

    def __init__(
        self, run: RunDirectory, backend: str, timeout: float, *, is_over: bool = True
    ) -> None:
        super().__init__(run, backend)
        self._timeout = timeout
        self._is_over = is_over
        self._wanted = _Lock(run, _wanted_name(run, backend))

    def __enter__(self) -> None:
        deadline = time.monotonic() + self._timeout
        # The helper process sees that this lock is held (`is_wanted`), and then frees its own.
        self._wanted.take()
        try:
            while not self.take():
                if not self._is_over:
                    raise DeliveryError(
                        f"run {self._run.id} is not over, and its own helper process delivers to "
                        f"{self._backend}: `{self._run.command('show')}` prints its progress"
                    )
                if time.monotonic() >= deadline:
                    raise DeliveryError(
                        f"run {self._run.id} is being delivered to {self._backend} by its own helper "
                        f"process, which did not stop within {self._timeout:g} s (it stops when its current "
                        "attempt has ended; a slow server can draw that out for minutes): "
                        f"`{self._run.command('show')}` prints its progress; call "
                        f"`{self._run.command('sync')}` again later"
                    )
                time.sleep(_POLL)
        finally:
            self._wanted.free()


def is_wanted(run: RunDirectory, backend: str) -> bool:
    """Return True if another process waits to take over the delivery of a run to a backend."""
    return _is_held(run.path / _wanted_name(run, backend))


def _wanted_name(run: RunDirectory, backend: str) -> str:
    return f"{run.delivery.name}/{backend}.wanted"


class HelperLock(_Lock):
    """Lock that a run's helper process holds while it lives.

    After the helper process has ended, other processes take the lock to complete the run. In
    ``with HelperLock(run) as is_free``, ``is_free`` is True if the lock was free and no uploader of the run
    is at work.
    """

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run, "helper.lock")

    def __enter__(self) -> bool:
        return self.take() and not any(map(_is_held, self._run.delivery.glob("*.lock")))


def _is_held(path: Path) -> bool:
    try:
        with open_plain(path.parent, path.name) as file:
            return not _locked(file, shared=True)
    except OSError:
        return False


def _locked(file: BinaryIO, *, shared: bool) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks, as some network ones
    return True


Claim: TypeAlias = Literal["in process", "whole", "missing"]
"""State of a user's run. ``in process``: the training process writes to the run, or still can. ``whole``:
the run has all data. ``missing``: the run lacks data."""
ClaimOf: TypeAlias = Callable[[str], Claim]

_SUFFIX = ".ride"
"""Suffix of the saved file. Earlier versions wrote this suffix, so it stays."""


class InProcessState(msgspec.Struct, kw_only=True):
    """State of the in-process writer that writes one session's data to the user's runs in one backend."""

    backend: str
    stage: Stage = "delivering"
    problem: str | None = None
    joined: list[str] = []
    """Ids of the user's runs to which the writer has written."""
    whole: list[str] = []
    """Ids of the user's runs for which no data is left to deliver. The reason is one of three: the run has
    all data, memlog opened another run and delivered the data to it, or the user has disabled the run."""
    delivered: int = 0
    """Number of points put into rows. If several steps share a row, the points of each step count."""
    folded: int = 0
    """Number of steps, evaluations and epochs without a complete row of their own. For example, a step shares
    its row with a later step, or one of the step's values came after the row was closed."""
    dropped: dict[str, int] = {}

    # Constants with the names of attributes of `UploadState`, for code that reads both kinds of state.
    own_run: None = None
    provisional: int = 0

    def save(self, run: RunDirectory) -> None:
        with replacing(run.path, f"{run.delivery.name}/{self.backend}{_SUFFIX}") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @staticmethod
    def load(run: RunDirectory, backend: str) -> InProcessState | None:
        """Return the saved state; ``None`` if no state can be read.

        If the trainer died before the writing had ended, `problem` says that the run may lack data.
        """
        try:
            kept = read_plain(run.path, f"{run.delivery.name}/{backend}{_SUFFIX}", MAX_STATE)
            state = msgspec.json.decode(kept, type=InProcessState)
        except (OSError, ValueError, *UNDECODABLE):
            return None
        if state.stage == "delivering" and not run.is_alive():
            state.stage = "waiting"
            state.problem = (
                "the trainer's process ended before memlog had written everything, so the run may lack data: "
                f"`{run.command('sync')}` delivers the whole series to a new run"
            )
        return state

    def mark_delivered(self, run: RunDirectory) -> None:
        """Save the stage ``done``. A run that memlog opened has the data of all runs in ``joined``."""
        self.whole = list(self.joined)
        self.stage, self.problem = "done", None
        self.save(run)


def all_states(run: RunDirectory) -> list[UploadState | InProcessState]:
    backends = sorted(path.stem for path in run.delivery.glob(f"*{_SUFFIX}"))
    in_process = (InProcessState.load(run, name) for name in backends)
    return [*(state for state in in_process if state is not None), *read_states(run)]


def claims_while_in_process(_run_id: str) -> Claim:
    """Return ``in process`` for every user's run.

    The helper process uses this function, because the training process writes to these runs.
    """
    return "in process"


def claims_of(run: RunDirectory, backend: str, *, complete: bool) -> ClaimOf:
    """Return a function that returns the state of a user's run, for use by ``memlog sync``.

    ``complete`` is True if the trainer has ended.
    """
    state = InProcessState.load(run, backend)
    whole = frozenset(state.whole if state else ())

    def claim(run_id: str) -> Claim:
        if run_id in whole:
            return "whole"
        return "missing" if complete else "in process"

    return claim
