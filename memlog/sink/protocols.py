"""Protocols of an integration: the backend, and the sink and the artifact store that the backend opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from memlog.events import Alert, Artifact, Status
from memlog.sink.records import Connection, Point, Resolution, StoredArtifact, Target, TrackerRun


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
class EndingBackend(Backend, Protocol):
    """Backend that notices when the user's program ends a run, so that memlog settles the verdict first."""

    def watch_ends(self, before: Callable[[str, Status], object]) -> Callable[[], object]:
        """Call ``before`` each time the program is about to end a run. Return a function that stops this.

        Args:
            before: Function called on the program's thread with the tracker's id of the run, and how the run
                ends. It does not raise.
        """
