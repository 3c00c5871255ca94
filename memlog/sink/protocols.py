"""Protocols of an integration, and the data that memlog and an integration exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from memlog.events import Alert, Artifact, Status

LOCAL = "local"
"""Name of the built-in backend: the journal itself. It needs no sink."""
WEBHOOK = "webhook"
"""Name of the backend that gets alerts only. Its sink has an attribute ``takes_points``, which is False."""

OFFLINE = "offline:"
"""Prefix of a run's address, if the tracker's client has written the run to a folder for a later upload. The
folder follows the prefix, as in ``offline:/home/me/wandb/offline-run-1#project/runs/1``."""
CLOSING_PARAMETERS = frozenset({"overhead_ms", "dropped", "faults"})
"""Parameters that each session sends at its end. Sessions that write to the same run send different
values. If a tracker never changes a parameter, its sink keeps the first values without a warning."""
DISABLED = "disabled:"
"""Address of a run that the user has disabled. The tracker stores no data of such a run."""

STEP_PREFIX = "memory/host/"
"""Beginning of the names of metrics that every step has, and that lie on the axis of steps."""

Axis: TypeAlias = Literal["step", "evaluation", "epoch"]
Resolution: TypeAlias = Literal["full", "bucketed"]
Fold: TypeAlias = Literal["last", "max", "min"]
"""Rule by which several values of one metric become one: keep the last, the largest or the smallest value."""


class Point(msgspec.Struct, frozen=True):
    """One value of one metric, as a tracker gets it."""

    name: str
    value: float
    axis: Axis
    index: int
    """Position on the axis: the step, evaluation or epoch."""
    time_us: int
    """Unix time of the event in microseconds. So a point that is sent again has the same time as before."""
    fold: Fold = "last"
    """Rule that combines several values of the metric into one. ``value`` may already be a combined value."""


class TrackerRun(msgspec.Struct, frozen=True):
    """Run in a tracker."""

    run_id: str
    uri: str | None = None
    """Address of the tracker in the form that its client expects, or an address that begins with `OFFLINE` or
    `DISABLED`. An address may contain a password, so memlog never stores an address unchanged."""
    name: str | None = None
    """Display name of the run."""
    link: str | None = None
    """Address of the run's page in the browser, without passwords. If there is no page, this is the command
    that shows the run."""


class Connection(msgspec.Struct, frozen=True):
    """Data that a tracker's client needs to connect.

    The data is passed in memory only, never on a disk or a command line.
    """

    uri: str | None = None
    environment: Mapping[str, str] = {}


class Target(msgspec.Struct, frozen=True):
    """Run that a sink writes to."""

    memlog_run: str
    """memlog's own run id."""
    joined: TrackerRun | None
    """The user's run, which the sink joins and never ends; ``None``: the sink opens a run of its own."""
    opened: TrackerRun | None = None
    """Run that an earlier sink opened for this target. If it is ``None``, the sink searches for such a run by
    `own_id` or `id_with_beside`. If the sink finds no run, the sink opens a run."""
    project: str | None = None
    name: str | None = None
    begun_us: int | None = None
    """Start of the run, Unix time in microseconds. Delivery may begin long after this time."""
    beside: TrackerRun | None = None
    """Run of the user that this sink must not write to. The sink groups its own run with the user's run."""
    connection: Connection = Connection()
    continues: str | None = None
    """memlog's id of the training's first session, which opened the run before a restart. The sink continues
    that run, even if the run has ended. ``None``: this session opens the run."""

    @property
    def own_id(self) -> str:
        """Id by which the sink finds memlog's own run again."""
        return self.continues or self.memlog_run

    @property
    def id_with_beside(self) -> str:
        """Id of the sink's own run: `own_id`. If ``beside`` is a run, a digest of that run's id follows.

        Two targets with different runs in ``beside`` have different ids.
        """
        if self.beside is None:
            return self.own_id
        import hashlib  # noqa: PLC0415 - 3 ms of `import memlog`, and only the helper process needs it

        # A digest, because the id of the user's run may already be as long as the tracker allows.
        digest = hashlib.blake2s(self.beside.run_id.encode(), digest_size=4).hexdigest()
        return f"{self.own_id}-{digest}"


class StoredArtifact(msgspec.Struct, frozen=True):
    """File that memlog has uploaded to a tracker."""

    name: str
    kind: str
    size: int | None
    """Bytes; ``None`` if the tracker does not report the size."""


@runtime_checkable
class Sink(Protocol):
    """Writer of points to one run of one tracker. All calls come from one thread. Every method may block.

    On failure, a method raises `TrackerUnavailableError` if a later attempt can succeed, and
    `TrackerRejectedError` if no attempt can. Any other exception counts as `TrackerUnavailableError`. If the
    run is deleted or missing, a method raises `RunRefusedError`. memlog then keeps the data for that run
    until the run exists again. A `TrackerRejectedError` from `probe` or `open` counts as `RunRefusedError`.
    """

    durable: bool
    """True if data is safe after the call that stores the data; False if data is safe only after `close`."""
    resolution: Resolution
    """``"full"``: every step; ``"bucketed"``: steps are grouped, so that a long run stays small enough."""
    max_points: int
    """Maximum number of points that one call of `log_points` accepts."""
    dropped: Mapping[str, int]
    """Number of points and parameters that the sink has left out so far, by reason."""

    def probe(self) -> None:
        """Check that the tracker can be reached. If it can't be reached, raise within about two seconds."""

    def open(self) -> TrackerRun:
        """Join the user's run, find the run that an earlier sink opened, or open a new run.

        Each further call only returns the same run.
        """

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

        A later file of the same name replaces the stored file. ``file`` is a copy that memlog deletes after
        the call. If the client reads the file later than that, the sink sets an attribute ``keeps_files`` to
        True. memlog then passes the run's own file instead of a copy.
        """

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Release the sink's resources. If ``status`` is not None, end the run that the sink opened itself.

        Args:
            status: How the run ended; ``None``: the run has not ended.
            ended_us: End of the run, Unix time in microseconds; ``None``: now.
        """


@runtime_checkable
class DescribingSink(Protocol):
    """Sink whose tracker shows a text about a run. Its methods raise the same errors as those of `Sink`.

    If the tracker stores no files, the sink sets an attribute ``has_files`` to False. The text then does not
    say how to fetch files.
    """

    def wants_description(self) -> bool:
        """Return True if the run has no description, or one that this sink may replace.

        A sink never replaces a text that the user has written or changed.
        """

    def log_description(self, text: str) -> None:
        """Show a text about the run.

        Args:
            text: Markdown, of a few thousand characters at most.
        """


class ArtifactStore(Protocol):
    """Reader of files in one tracker.

    Every method raises `TrackerUnavailableError` or `TrackerRejectedError`, as a sink does, and
    `UnknownRunError` if the tracker has no such run.
    """

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """Return the files that memlog uploaded to a run.

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
            progress: Function called with the number of bytes of each part that arrives.
        """


@runtime_checkable
class Backend(Protocol):
    """Half of an integration: the half that the training process imports.

    The import must not load the tracker's client.
    """

    name: str
    requires: str
    """Top-level module of the tracker's client, such as ``"mlflow"``."""
    extra: str
    """Name of the extra that installs the client. The backend's own distribution defines this extra."""
    in_process: bool
    """True if only the trainer's own process can write to a run that the user has opened."""

    def active_run(self) -> TrackerRun | None:
        """Return the user's open run on this thread. The call takes microseconds and imports nothing."""

    def connection(self) -> Connection:
        """Return the address and environment with which the client would connect from this process."""

    def prepare(self) -> None:
        """Do slow work that needs no connection, such as importing the client. Runs in the helper process."""

    def open_sink(self, target: Target) -> Sink:
        """Build the sink. memlog never calls this in the training process.

        Only this method, `open_store` and `prepare` may import the client.
        """

    def open_store(self, connection: Connection) -> ArtifactStore:
        """Build the reader of the tracker's files. memlog never calls this in the training process."""


@runtime_checkable
class JoinableBackend(Backend, Protocol):
    """Backend that makes a complete `TrackerRun` from the arguments of `memlog.Session.join_run`."""

    def run_of(self, run_id: str, uri: str | None, name: str | None) -> TrackerRun | None:
        """Return the complete `TrackerRun` of this id; ``None`` if memlog can't write to the run.

        The call takes microseconds and imports nothing. If the backend is an `InProcessBackend`, memlog
        then passes the run to `InProcessBackend.open_in_process`.

        Args:
            run_id: The tracker's own id of the run.
            uri: Address of the tracker as its client expects it; ``None``: the address that the client uses
                now.
            name: Display name; ``None``: unknown.
        """


@runtime_checkable
class ResumableBackend(Backend, Protocol):
    """Backend whose tracker can go on with a run of an earlier process."""

    def last_step(self, run: TrackerRun) -> int | None:
        """Return the last step with memlog's values that ``run`` had when this process opened it.

        The result is ``None`` if the run is new, or if the step is unknown. The call sends no request to a
        server on another machine.

        Args:
            run: A run that `active_run` or `JoinableBackend.run_of` has just returned.
        """

    def may_go_on(self, run: TrackerRun) -> bool:
        """Return True if ``run`` may have earlier steps that `last_step` can't know."""


@runtime_checkable
class NumberingBackend(Backend, Protocol):
    """Backend that sees the step numbers at which the user's program logs."""

    def take_numbers(self, run: TrackerRun) -> Mapping[int, int]:
        """Return how often this process has logged to ``run`` at each number since the last call.

        The numbers are from 0 to 2^53. Of many different numbers, the newest are enough. The call takes about
        a microsecond.
        """

    def see_no_numbers(self) -> None:
        """Stop looking at the numbers, at the end of the session."""


USERS_NUMBER = "memlog/steps"
"""Name of a point that tells a sink of a `NumberingBackend` the user's number (its index) of one of memlog's
steps (its value). The points of this step and of later ones go on from the number."""


@runtime_checkable
class EndingBackend(Backend, Protocol):
    """Backend that notices when the user's program ends a run, so that memlog settles the verdict first."""

    def watch_ends(self, before: Callable[[str, Status], object]) -> Callable[[], object]:
        """Call ``before`` each time the program is about to end a run. Return a function that stops this.

        Args:
            before: Function called on the program's thread with the tracker's id of the run, and how the run
                ends. It does not raise.
        """


class Rows(Protocol):
    """Source of memlog's points for the rows of a user's run.

    The methods are called on the user's thread when the user logs. They never raise.
    """

    def enter(self, number: int | None) -> tuple[Sequence[Point], Sequence[Point]]:
        """Return the points to add when the user logs to a row.

        Args:
            number: Row number that the user passed. A new number closes the row that is open. ``None`` means
                that the user logs to the row that is open.

        Returns:
            Two lists with at most one point per metric: the points for the row that this call closes, and the
            points for the row that the user logs to.
        """

    def leave(self) -> None:
        """Record that the user has committed the row. The user's next values are in another row."""

    def give_back(self, points: Sequence[Point]) -> None:
        """Take back points from `enter`. The client raised an exception, so these points are in no row."""

    def failed(self, error: Exception) -> None:
        """Count an error of the integration. The user's values are then logged without memlog's points."""


class InProcessRun(Protocol):
    """Writer in the training process that adds memlog's data to a user's run.

    The user's own values stay unchanged. The writer is created on the user's thread. If the tracker's client
    raises an exception in a call by the user, the user gets that exception. If the client itself copies rows
    from another tracker's files into the run, an attribute ``copies_rows`` is True.
    """

    run_id: str

    @property
    def is_open(self) -> bool:
        """True until the user has ended the run."""

    def watch_end(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        """If the client allows it, register functions that are called when the user ends the run.

        Args:
            before: Function called on the user's thread just before the run ends. It can write to the run.
            after: Function called on the user's thread after the run has ended normally. Neither function
                raises.
        """

    def watch_rows(self, rows: Rows) -> int | None:
        """Begin to add points to the user's rows. Each time the user logs, ask ``rows`` for the points.

        If the user logs a metric with the name of a point, the user's values stay. memlog then adds no more
        points with this name.

        Returns:
            The number that the user gave the open row; ``None`` if the user gave none.
        """

    def leave_rows(self) -> None:
        """Stop adding points to the user's rows."""

    def log(self, points: Sequence[Point], *, new_row: bool) -> None:
        """Log points to the user's run now, without waiting until the user logs.

        Args:
            points: The points, at most one per metric.
            new_row: True: log into a new row after the open row. False: log into the open row. memlog passes
                True only if the user logs nothing more.
        """

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store facts that hold for the whole run."""

    def log_alert(self, alert: Alert) -> None:
        """Show an alert."""

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:
        """Store a file. The file is not moved or deleted."""


@runtime_checkable
class InProcessBackend(Backend, Protocol):
    """Backend that writes to the user's runs in the training process."""

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        """Return a writer for a run that `active_run` or `JoinableBackend.run_of` has just returned.

        The call takes microseconds and imports nothing.
        """


def writes_in_process(backend: Backend) -> bool:
    """Return the backend's ``in_process``, or False if the backend has no such attribute."""
    return bool(getattr(backend, "in_process", False))
