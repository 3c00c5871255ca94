"""What a tracker's integration provides, and how it is found by name.

An integration is a package of its own that registers one `Backend` under the entry point group
``memlog.sinks``. Its two halves live in two processes:

* the `Backend` is imported by the trainer, so importing it loads no tracker's client; it finds the run
  that the user has opened, and gathers what the client needs to connect;
* the `Sink` that it opens lives in the helper process (or in ``memlog sync``) and does the talking; the
  `ArtifactStore` brings files back for ``memlog pull``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from memlog._internal.credential_scope import Home, secret_names
from memlog._internal.diagnostics import warn
from memlog.errors import MissingExtraError, UnknownBackendError
from memlog.events import Alert, Artifact, Status

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP = "memlog.sinks"
LOCAL = "local"
"""The embedded backend: the journal itself. It needs no sink."""

OFFLINE = "offline:"
"""Begins the address of a run that stands in a folder, which follows, until the tracker's client is told to
upload it: ``offline:/home/me/wandb/offline-run-1#project/runs/1``."""
DISABLED = "disabled:"
"""The address of a run that the user has disabled: the tracker keeps nothing of it."""

Axis: TypeAlias = Literal["step", "evaluation", "epoch"]
Resolution: TypeAlias = Literal["full", "bucketed"]
Fold: TypeAlias = Literal["last", "max", "min"]
"""How several values of one metric become one: levels keep the last, peaks the largest."""


class Point(msgspec.Struct, frozen=True):
    """One value of one metric, as a tracker gets it."""

    name: str
    value: float
    axis: Axis
    index: int
    """Where on its axis: the step, evaluation or epoch."""
    time_us: int
    """The event's own Unix time in microseconds, so that a replay yields the same point."""
    fold: Fold = "last"
    """How it was, and is to be, summed up with others of its metric."""


class TrackerRun(msgspec.Struct, frozen=True):
    """A run in a tracker."""

    run_id: str
    uri: str | None = None
    """Where the tracker is, as its client understands it, or what `OFFLINE` and `DISABLED` say; may hold a
    password, so never stored as it is."""
    name: str | None = None
    """What people call the run."""


class Connection(msgspec.Struct, frozen=True):
    """What a tracker's client needs to connect; passed in memory only, never on a disk or command line."""

    uri: str | None = None
    environment: Mapping[str, str] = {}


class Target(msgspec.Struct, frozen=True):
    """Which run a sink is to write to."""

    memlog_run: str
    """memlog's own run id, by which a run that a sink opened before is found again."""
    joined: TrackerRun | None
    """The user's run, which is joined and never ended; ``None``: the sink opens one of its own."""
    opened: TrackerRun | None = None
    """The run that an earlier sink opened for this; ``None``: look for it by ``memlog_run``, or open one."""
    project: str | None = None
    name: str | None = None
    begun_us: int | None = None
    """When the run began, Unix time in microseconds: it may be delivered long after."""
    beside: TrackerRun | None = None
    """A run of the user's that must not be written to any more: the sink's own run is grouped with it."""
    connection: Connection = Connection()


@runtime_checkable
class Sink(Protocol):
    """Hands points to one run of one tracker. Called from one thread; every method may block.

    Every method raises `TrackerUnavailableError` where trying again later can help and
    `TrackerRejectedError` where it can't; anything else counts as unavailable. What a run that is deleted or
    gone can't take (`RunRefusedError`; from `open`, whatever is rejected) is kept until it can.
    """

    durable: bool
    """Whether what a call has stored is safe when it returns; ``False``: only once `close` has returned."""
    resolution: Resolution
    """``"full"``: every step; ``"bucketed"``: steps are folded so that a long run stays bearable."""
    max_points: int
    """The most points that one call of `log_points` takes."""
    dropped: Mapping[str, int]
    """Points and parameters that it had to leave out so far, by reason."""

    def probe(self) -> None:
        """Asks whether the tracker is there: that nobody is there shows within about two seconds."""

    def open(self) -> TrackerRun:
        """Joins the user's run, finds the one opened before, or opens one. Calling it again is harmless."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Stores the points; storing a point again changes nothing."""

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Stores facts that hold for the whole run; storing them again changes nothing."""

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Shows alerts: all of the run's so far, of which those from index ``first_new`` on are new.

        Showing them again does no harm.
        """

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Stores a file under ``artifact.name`` and ``artifact.kind``.

        A later one of the same name takes its place. The file is a copy that goes when the call has returned;
        where the client reads it after that, the sink has an attribute ``keeps_files`` that is true, and
        gets the run's own.
        """

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Gives back what the sink holds; a run of its own is ended unless ``status`` is None.

        Args:
            status: How the run ended.
            ended_us: When, Unix time in microseconds; ``None``: now.
        """


class StoredArtifact(msgspec.Struct, frozen=True):
    """A file of memlog's that a tracker holds."""

    name: str
    kind: str
    size: int | None
    """Bytes; ``None`` where the tracker does not say."""


class ArtifactStore(Protocol):
    """Brings files back from one tracker.

    Every method raises `TrackerUnavailableError` or `TrackerRejectedError`, as a sink does, and
    `UnknownRunError` where the tracker has no such run.
    """

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """The files of a run that are memlog's.

        Args:
            run_id: The tracker's own id of the run.
        """

    def fetch(
        self,
        run_id: str,
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        """Downloads one file into ``directory``, under its name.

        Args:
            run_id: The tracker's own id of the run.
            artifact: One of those that `list_artifacts` told.
            directory: An empty folder.
            progress: Told of bytes as they arrive.
        """


@runtime_checkable
class Backend(Protocol):
    """The light half of an integration, imported in the trainer's process."""

    name: str
    requires: str
    """The top-level module of the tracker's client, such as ``"mlflow"``."""
    extra: str
    """The extra of the backend's own distribution that installs it."""
    in_process: bool
    """Whether a run of the user's can be written only from the trainer's own process, beside the user."""

    def active_run(self) -> TrackerRun | None:
        """The run that the user has open on this thread. Takes microseconds and imports nothing."""

    def connection(self) -> Connection:
        """What the client would use to connect if it were called in this process, now."""

    def prepare(self) -> None:
        """Does, in the helper process, what takes seconds and needs no connection: the client's import."""

    def open_sink(self, target: Target) -> Sink:
        """Builds the sink, in a process of memlog's own; only here and in `prepare` is it imported."""

    def open_store(self, connection: Connection) -> ArtifactStore:
        """Builds what brings files back, in a process of memlog's own."""


class Rows(Protocol):
    """What goes into the rows of a user's run. Called on the user's thread as they log; never raises."""

    def enter(self, number: int | None) -> tuple[Sequence[Point], Sequence[Point]]:
        """The user logs to a row.

        Args:
            number: The row's number where the user gives one: a new one closes the row before. ``None``:
                they log to the row that is open.

        Returns:
            The points, one a metric, that still go into the row which this closes, and those that go into
            the row that the user logs to.
        """

    def leave(self) -> None:
        """The user has committed the row: what they log next is in another one."""

    def give_back(self, points: Sequence[Point]) -> None:
        """The tracker's client raised: the points that the row was to get are not in it."""

    def failed(self, error: Exception) -> None:
        """Counts an error of the integration's own: what the user logs is passed on without points."""


class InProcessRun(Protocol):
    """Writes to a run of the user's from the trainer's process, beside the user, whose rows stay as they are.

    Made on the user's thread. What is passed on raises as the tracker's client does.
    """

    run_id: str

    @property
    def is_open(self) -> bool:
        """Whether the user has not ended the run."""

    def watch_end(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Has the user's end of the run told of, where the tracker's client knows a way to.

        Args:
            before: Called on the user's thread as the run is about to end, and can still be written to.
            after: Called there when it has ended in order. Neither raises.
        """

    def watch_rows(self, rows: Rows) -> int | None:
        """Asks ``rows``, each time that the user logs, what goes into the same row.

        What the user logs goes before a point of the same name, in this row and all that follow.

        Returns:
            The number that the user gave the row that is open; ``None`` where they gave none.
        """

    def leave_rows(self) -> None:
        """Asks for nothing any more."""

    def log(self, points: Sequence[Point], *, new_row: bool) -> None:
        """Puts points, one a metric, into a run that the user logs nothing more to.

        Args:
            points: The points.
            new_row: Into a row behind the user's last; ``False``: into the row that is open.
        """

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Stores facts that hold for the whole run."""

    def log_alert(self, alert: Alert) -> None:
        """Shows an alert."""

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:
        """Stores a file, which stays where it is."""


@runtime_checkable
class InProcessBackend(Backend, Protocol):
    """A backend whose users' runs are written in process."""

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        """Begins to write to a run that `active_run` has just found. Takes microseconds, loads nothing."""


def writes_in_process(backend: Backend) -> bool:
    """Whether a run of the user's is written from the trainer's process; one that does not say is not."""
    return bool(getattr(backend, "in_process", False))


def home_of(backend: Backend) -> Home:
    """Where the environment's credentials belong, and which there are.

    A backend that knows better than the names of variables has a method ``home`` that returns it.
    """
    if (own := getattr(backend, "home", None)) is not None:
        home: Home = own()
        return home
    connection = backend.connection()
    return Home(connection.uri, secret_names(connection.environment))


def find_backends() -> dict[str, Backend]:
    """Every backend that an installed package registers and whose client is installed, by name."""
    found = {}
    for entry in _entry_points():
        try:
            backend = entry.load()
        except Exception as error:  # noqa: BLE001 - nobody asked for this one
            warn(f"memlog: backend {entry.name!r} is broken and left out: {error!r}")
            continue
        if is_installed(backend.requires):
            found[entry.name] = backend
    return found


def backends_to_look_in(names: Sequence[str]) -> dict[str, Backend]:
    """Where a run of the user's is looked for: in the backends of these names, or in all that are installed.

    Raises:
        UnknownBackendError: no installed package registers one of them.
        MissingExtraError: its tracker's client is not installed.
    """
    if names:
        return {name: load_backend(name) for name in names if name != LOCAL}
    return find_backends()


def load_backend(name: str) -> Backend:
    """The backend called ``name``.

    Raises:
        UnknownBackendError: no installed package registers it.
        MissingExtraError: its tracker's client is not installed.
    """
    entries = {entry.name: entry for entry in _entry_points()}
    if name not in entries:
        import difflib  # noqa: PLC0415 - for a message alone

        known = sorted([LOCAL, *entries])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownBackendError(
            f"no backend is called {name!r}: {hint}there are {', '.join(known)}"
        )
    backend: Backend = entries[name].load()
    if not is_installed(backend.requires):
        raise MissingExtraError(
            f"backend {name!r} needs the package {backend.requires!r}, which is not installed: "
            f"pip install {_packages(entries[name], backend)}"
        )
    return backend


def _packages(entry: EntryPoint, backend: Backend) -> str:
    """What the backend's extra installs: its own distribution need not be in an index."""
    extra = f"extra == '{backend.extra}'"
    lines = (line.replace('"', "'") for line in (entry.dist and entry.dist.requires) or ())
    wanted = [f"'{line.partition(';')[0].strip()}'" for line in lines if extra in line]
    return " ".join(wanted) or backend.requires


def _entry_points() -> EntryPoints:
    # Imported here because it takes 10 ms, which `import memlog` need not.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=ENTRY_POINT_GROUP)


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported for real.

    A folder of that name in the working directory (W&B makes one called ``wandb``) passes for an empty
    namespace package; such a find has no origin.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # something else stands in its place in sys.modules
        return False
    return spec is not None and spec.origin is not None
