"""Protocols of an integration that runs in the training process and adds points to the user's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from memlog.events import Alert, Artifact
from memlog.sink.protocols import Backend
from memlog.sink.records import Point, TrackerRun


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
