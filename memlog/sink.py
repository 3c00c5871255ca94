"""Interface of a tracker's integration, and the search for integrations by name.

An integration is a package of its own that registers one `Backend` under the entry point group
``memlog.sinks``. Its two halves run in two processes:

* The `Backend` is imported by the trainer, so its import must not load the tracker's client. It finds the run
  that the user has opened and collects what the client needs to connect.
* The `Sink` that it opens runs in the helper process (or in ``memlog sync``) and talks to the tracker. The
  `ArtifactStore` fetches files for ``memlog pull``.
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
"""Name of the built-in backend: the journal itself. It needs no sink."""

OFFLINE = "offline:"
"""Prefix of the address of a run that the tracker's client has written to a folder for a later upload. The
folder follows: ``offline:/home/me/wandb/offline-run-1#project/runs/1``."""
CLOSING_PARAMETERS = frozenset({"overhead_ms", "dropped", "faults"})
"""Parameters that each session sends at its end. If several sessions write to one run of a tracker that never
changes a parameter, that of the first stays, without a warning."""
DISABLED = "disabled:"
"""Address of a run that the user has disabled: the tracker stores nothing of it."""

Axis: TypeAlias = Literal["step", "evaluation", "epoch"]
Resolution: TypeAlias = Literal["full", "bucketed"]
Fold: TypeAlias = Literal["last", "max", "min"]
"""How several values of one metric become one: levels keep the last value, peaks the largest."""


class Point(msgspec.Struct, frozen=True):
    """One value of one metric, as a tracker gets it."""

    name: str
    value: float
    axis: Axis
    index: int
    """Position on the axis: the step, evaluation or epoch."""
    time_us: int
    """The event's own Unix time in microseconds, so that a replay yields the same point."""
    fold: Fold = "last"
    """How this value was combined with others of its metric, and how to combine it further."""


class TrackerRun(msgspec.Struct, frozen=True):
    """Run in a tracker."""

    run_id: str
    uri: str | None = None
    """Address of the tracker, as its client expects it, or one that begins with `OFFLINE` or `DISABLED`. It
    may contain a password, so it is never stored unchanged."""
    name: str | None = None
    """Display name of the run."""
    link: str | None = None
    """Address of the run's page in the browser, or else the command that shows the run; without passwords."""


class Connection(msgspec.Struct, frozen=True):
    """Data that a tracker's client needs to connect.

    It is passed in memory only, never on a disk or command line.
    """

    uri: str | None = None
    environment: Mapping[str, str] = {}


class Target(msgspec.Struct, frozen=True):
    """Run that a sink writes to."""

    memlog_run: str
    """memlog's own run id. It identifies a run that an earlier sink opened."""
    joined: TrackerRun | None
    """The user's run, which the sink joins and never ends; ``None``: the sink opens a run of its own."""
    opened: TrackerRun | None = None
    """Run that an earlier sink opened for this target; ``None``: search for it by ``memlog_run``, or open
    one."""
    project: str | None = None
    name: str | None = None
    begun_us: int | None = None
    """Start of the run, Unix time in microseconds. Delivery may happen long after."""
    beside: TrackerRun | None = None
    """Run of the user that this sink must not write to. The sink groups its own run with it."""
    connection: Connection = Connection()
    continues: str | None = None
    """memlog's id of the session that opened the run, if the training was restarted since: the sink goes on
    in that run, which may have ended; ``None``: the run is this session's."""

    @property
    def own_id(self) -> str:
        """The id by which a run of memlog's own is found again."""
        return self.continues or self.memlog_run


@runtime_checkable
class Sink(Protocol):
    """Writer of points to one run of one tracker. Called from one thread; every method may block.

    Every method raises `TrackerUnavailableError` if a later attempt can succeed, and `TrackerRejectedError`
    if it can't. Any other exception counts as unavailable. If the run is deleted or missing, a method raises
    `RunRefusedError`. memlog then keeps the data for that run until the run can take it. memlog treats every
    rejection by `open` in the same way.
    """

    durable: bool
    """True if data is safe when the call that stores it returns; False if only after `close` has returned."""
    resolution: Resolution
    """``"full"``: every step; ``"bucketed"``: steps are grouped, so that a long run stays small enough."""
    max_points: int
    """Most points that one call of `log_points` accepts."""
    dropped: Mapping[str, int]
    """Number of points and parameters that the sink has left out so far, by reason."""

    def probe(self) -> None:
        """Check that the tracker can be reached. Must fail within about two seconds if it can't."""

    def open(self) -> TrackerRun:
        """Join the user's run, find the one opened before, or open one. Calling it again has no effect."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Store the points. Storing a point again changes nothing."""

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store facts that hold for the whole run. Storing them again changes nothing."""

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Show alerts.

        Showing an alert again has no effect.

        Args:
            alerts: All alerts of the run so far.
            first_new: Index of the first alert that is new.
        """

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Store a file under ``artifact.name`` and ``artifact.kind``.

        A later file of the same name replaces it. ``file`` is a copy that is deleted after the call has
        returned. If the client reads the file later than that, the sink sets an attribute ``keeps_files`` to
        True, and gets the run's own file instead.
        """

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Release the sink's resources. End its own run unless ``status`` is None.

        Args:
            status: How the run ended.
            ended_us: End of the run, Unix time in microseconds; ``None``: now.
        """


@runtime_checkable
class DescribingSink(Protocol):
    """Sink whose tracker shows a text about a run. Its methods raise what those of `Sink` raise.

    If the tracker stores no files, the sink sets an attribute ``has_files`` to False, and the text does not
    say that they can be fetched.
    """

    def wants_description(self) -> bool:
        """Return True if this sink opened the run, not the user, and nobody has described it."""

    def log_description(self, text: str) -> None:
        """Show a text about the run.

        Args:
            text: Markdown, of a few thousand characters at most.
        """


class StoredArtifact(msgspec.Struct, frozen=True):
    """File of memlog's that a tracker stores."""

    name: str
    kind: str
    size: int | None
    """Bytes; ``None`` if the tracker does not report the size."""


class ArtifactStore(Protocol):
    """Reader of files in one tracker.

    Every method raises `TrackerUnavailableError` or `TrackerRejectedError`, as a sink does, and
    `UnknownRunError` if the tracker has no such run.
    """

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """Return the files of a run that memlog uploaded.

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
        """Download one file into ``directory``, under its name.

        Args:
            run_id: The tracker's own id of the run.
            artifact: One of the files that `list_artifacts` returned.
            directory: Empty folder.
            progress: Called with the number of bytes of each part that arrives.
        """


@runtime_checkable
class Backend(Protocol):
    """Part of an integration that the trainer's process imports. It must be light."""

    name: str
    requires: str
    """Top-level module of the tracker's client, such as ``"mlflow"``."""
    extra: str
    """Extra of the backend's own distribution that installs the client."""
    in_process: bool
    """True if only the trainer's own process can write to a run that the user has opened."""

    def active_run(self) -> TrackerRun | None:
        """Return the run that the user has open on this thread. Takes microseconds and imports nothing."""

    def connection(self) -> Connection:
        """Return what the client would use if it connected from this process now."""

    def prepare(self) -> None:
        """Do the slow work that needs no connection, such as the client's import, in the helper process."""

    def open_sink(self, target: Target) -> Sink:
        """Build the sink, in a process of memlog's own.

        Only this method and `prepare` may import the client.
        """

    def open_store(self, connection: Connection) -> ArtifactStore:
        """Build the reader of the tracker's files, in a process of memlog's own."""


@runtime_checkable
class JoinableBackend(Backend, Protocol):
    """Backend that completes what a caller of `memlog.Session.join_run` knows of a run."""

    def run_of(self, run_id: str, uri: str | None, name: str | None) -> TrackerRun | None:
        """Return a run that a logger holds; ``None`` if memlog can't write to it.

        It takes microseconds and imports nothing. `InProcessBackend.open_in_process` gets the run next.

        Args:
            run_id: The tracker's own id of the run.
            uri: Address of the tracker as its client expects it; ``None``: the client's present one.
            name: Display name; ``None``: unknown.
        """


class Rows(Protocol):
    """Source of memlog's points for the rows of a user's run.

    Called on the user's thread as the user logs. Never raises.
    """

    def enter(self, number: int | None) -> tuple[Sequence[Point], Sequence[Point]]:
        """Return the points to add when the user logs to a row.

        Args:
            number: Row number that the user passed; a new number closes the row before. ``None``: the user
                logs to the row that is open.

        Returns:
            Two lists with at most one point per metric: the points for the row that this call closes, and
            those for the row that the user logs to.
        """

    def leave(self) -> None:
        """Note that the user has committed the row. The user's next values are in another row."""

    def give_back(self, points: Sequence[Point]) -> None:
        """Take back points, because the tracker's client raised and they are not in the row."""

    def failed(self, error: Exception) -> None:
        """Count an error of the integration. The user's values are then logged without memlog's points."""


class InProcessRun(Protocol):
    """Writer to a user's run from the trainer's process. It leaves the user's own rows unchanged.

    Created on the user's thread. If the tracker's client raises on a user's call, the exception is passed on.
    """

    run_id: str

    @property
    def is_open(self) -> bool:
        """True until the user has ended the run."""

    def watch_end(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Call back when the user ends the run, if the tracker's client offers a way.

        Args:
            before: Called on the user's thread just before the run ends, while it can still be written to.
            after: Called on the user's thread after the run has ended normally. Neither function raises.
        """

    def watch_rows(self, rows: Rows) -> int | None:
        """Each time the user logs, ask ``rows`` for the points of the same row.

        If the user logs a metric of the same name as a point, the user's value wins, in this row and all
        later ones.

        Returns:
            The number that the user gave the open row; ``None`` if the user gave none.
        """

    def leave_rows(self) -> None:
        """Stop asking for points."""

    def log(self, points: Sequence[Point], *, new_row: bool) -> None:
        """Log points, at most one per metric, to a run to which the user logs nothing more.

        Args:
            points: The points.
            new_row: True: into a new row after the user's last row; False: into the row that is open.
        """

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store facts that hold for the whole run."""

    def log_alert(self, alert: Alert) -> None:
        """Show an alert."""

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:
        """Store a file. The file is not moved or deleted."""


@runtime_checkable
class InProcessBackend(Backend, Protocol):
    """Backend whose user runs are written in the trainer's process."""

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        """Return a writer for a run that `active_run` has just returned.

        Takes microseconds and imports nothing.
        """


def writes_in_process(backend: Backend) -> bool:
    """Return True if the trainer's process writes to the user's runs. The default is False."""
    return bool(getattr(backend, "in_process", False))


def home_of(backend: Backend) -> Home:
    """Return the tracker that the environment's credentials belong to, and the names of these credentials.

    A backend can define a method ``home`` that returns this, if the names of variables are not enough.
    """
    if (own := getattr(backend, "home", None)) is not None:
        home: Home = own()
        return home
    connection = backend.connection()
    return Home(connection.uri, secret_names(connection.environment))


def find_backends() -> dict[str, Backend]:
    """Return by name every backend that an installed package registers and whose client is installed."""
    found = {}
    for entry in _entry_points():
        try:
            backend = entry.load()
        except Exception as error:  # noqa: BLE001 - the user did not ask for this backend by name
            warn(
                f"memlog: backend {entry.name!r} can't be loaded and is left out ({error!r}): install its "
                "package again, or uninstall it"
            )
            continue
        if is_installed(backend.requires):
            found[entry.name] = backend
    return found


def backends_to_look_in(names: Sequence[str]) -> dict[str, Backend]:
    """Return the backends in which to search for a user's run.

    These are the backends of the given names, or all installed ones if ``names`` is empty.

    Raises:
        UnknownBackendError: No installed package registers one of them.
        MissingExtraError: The client of its tracker is not installed.
    """
    if names:
        return {name: load_backend(name) for name in names if name != LOCAL}
    return find_backends()


def load_backend(name: str) -> Backend:
    """Return the backend named ``name``.

    Raises:
        UnknownBackendError: No installed package registers it.
        MissingExtraError: The client of its tracker is not installed.
    """
    entries = {entry.name: entry for entry in _entry_points()}
    if name not in entries:
        import difflib  # noqa: PLC0415 - needed only for this message

        known = sorted([LOCAL, *entries])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownBackendError(
            f"no backend is called {name!r}: {hint}available: {', '.join(known)}"
        )
    backend: Backend = entries[name].load()
    if not is_installed(backend.requires):
        raise MissingExtraError(
            f"backend {name!r} needs the package {backend.requires!r}, which is not installed: "
            f"pip install {_packages(entries[name], backend)}"
        )
    return backend


def _packages(entry: EntryPoint, backend: Backend) -> str:
    """Return the packages of the backend's extra. The backend itself may not be in a package index."""
    extra = f"extra == '{backend.extra}'"
    lines = (line.replace('"', "'") for line in (entry.dist and entry.dist.requires) or ())
    wanted = [f"'{line.partition(';')[0].strip()}'" for line in lines if extra in line]
    return " ".join(wanted) or backend.requires


def _entry_points() -> EntryPoints:
    # Imported here because this import takes 10 ms, and `import memlog` does not need it.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=ENTRY_POINT_GROUP)


def is_installed(module: str) -> bool:
    """Return True if ``module`` is really installed.

    A folder of that name in the working directory (W&B creates one called ``wandb``) looks like an empty
    namespace package. Such a module has no origin.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # sys.modules has another object under this name
        return False
    return spec is not None and spec.origin is not None
