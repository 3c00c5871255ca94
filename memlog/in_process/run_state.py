"""State of one run that the in-process writer writes to: the data in the run, and the data that waits."""

from __future__ import annotations

from memlog._internal.diagnostics import Diagnostics
from memlog.events import (
    Alert,
    Artifact,
    Event,
    Health,
    Origin,
    Parameters,
    PinnedMemory,
    Sample,
    now_us,
)
from memlog.in_process.row_buffer import UsersRows
from memlog.journal import RunDirectory
from memlog.journal.artifacts import artifact_path
from memlog.metrics import in_run, parameters_of
from memlog.sink import InProcessRun


class RunState:
    """State of one of the user's runs. If the user ends and reopens the run, this object is kept.

    Attributes:
        user_run: The user's run, as the user opened it last.
        ended: True if the tracker's client has ended the run at the user's request.
        offset: `memlog.journal.Binding.offset` of the run.
    """

    def __init__(self, user_run: InProcessRun, diagnostics: Diagnostics) -> None:
        self.user_run = user_run
        self.ended = False
        self.offset = 0
        self.rows = UsersRows(diagnostics)
        self._diagnostics = diagnostics
        self.has_origin = self.has_report = False
        """True if the run gets the trainer's command and host, or the report, from the helper process."""
        self._closed_us: int | None = None
        self._others: list[Parameters | Alert | Artifact] = []
        self._in_series = 0
        self._begin()

    @property
    def is_waiting(self) -> bool:
        """True if data waits for the run. While the run can get more rows, values for rows do not count."""
        rows_come = self.is_watched and self.user_run.is_open
        return bool(self._others) or (self.rows.has_waiting and not rows_come)

    @property
    def needs_series(self) -> bool:
        """True if a step shares a row with a later step, and the tracker has no CSV file with this step."""
        return self.rows.folded > self._in_series

    @property
    def is_whole(self) -> bool:
        """True if the tracker has everything of the run so far."""
        return not self.is_waiting and not self.needs_series

    def resume(self, user_run: InProcessRun) -> None:
        """Continue to write to the run, because the user has opened it again."""
        self.user_run, self.ended, self._closed_us = user_run, False, None
        self.has_report = False
        self._begin()

    def close(self) -> None:
        """Record that the run ends now. It needs no later health events, samples and alerts."""
        self._closed_us = now_us()

    def _begin(self) -> None:
        self.is_watched = False
        with self._diagnostics.contained("beginning to watch the user's rows"):
            self.rows.open(self.user_run.watch_rows(self.rows))
            self.is_watched = True

    def receive(self, event: Event) -> None:
        """Add the values of a new event of this process to the data that waits for the run's rows.

        Call this method only on the user's newest run.
        """
        own = in_run(event, self.offset)
        if own is not None and self._is_wanted(own):
            self.rows.receive(own)

    def take(self, event: Event, *, received: bool) -> None:
        """Add an event from the journal to the data that waits for the run.

        If ``received`` is True, `receive` has already got the event, so leave the event's values out.
        """
        own = in_run(event, self.offset)
        if own is None or not self._is_wanted(own):
            return
        if not received:
            self.rows.fold_received()  # the helper's events may be of later steps
            self.rows.add(own)
        if not self.user_run.is_open and self._comes_too_late(own):
            return
        self.has_origin = self.has_origin or isinstance(own, Origin)
        self.has_report = self.has_report or (isinstance(own, Artifact) and own.is_report)
        other = own if isinstance(own, (Alert, Artifact)) else parameters_of(own)
        if other is not None:
            self._others.append(other)

    def _comes_too_late(self, event: Event) -> bool:
        """Return whether an ended run is complete without an event: it has its own, or the event is newer."""
        if isinstance(event, Artifact):
            return event.is_report
        is_newer = self._closed_us is not None and event.time_us >= self._closed_us
        return isinstance(event, Origin) or (isinstance(event, Alert) and is_newer)

    def _is_wanted(self, event: Event) -> bool:
        """Return whether the run needs an event. Ended runs need no health events and no samples."""
        goes_on = self.user_run.is_open and self._closed_us is None
        return goes_on or not isinstance(event, (Health, PinnedMemory, Sample))

    def write_others(self, run: RunDirectory) -> None:
        """Write the data that is in no row: parameters, alerts, files."""
        self.rows.fold_received()
        if not self._others or not self.user_run.is_open:
            return
        # Files last: if the server can't be reached, only the files wait for it, and then fail.
        for other in sorted(self._others, key=lambda event: isinstance(event, Artifact)):
            self._write(other, run)
            self._others.remove(other)

    def put_remaining(self, *, final: bool = True) -> None:
        """Put the values that wait into the user's run. Call it on the user's thread.

        Pass ``final`` as False if the user may still log to the last row. memlog then adds no row, because a
        new row would close the last row. Values of steps after the last row wait for the user's next row.
        """
        if not self.is_watched or not self.user_run.is_open:
            return
        with self._diagnostics.contained("putting the last values into the user's run"):
            if points := self.rows.take_for_open_row():
                self.user_run.log(points, new_row=False)
            if final and (points := self.rows.take_for_new_row()):
                self.user_run.log(points, new_row=True)
            if not self.rows.has_waiting:
                self.user_run.leave_rows()

    def log_series(self, artifact: Artifact, run: RunDirectory) -> None:
        """Write ``artifact``, a CSV file with every point so far, to the user's run."""
        self.user_run.log_artifact(artifact, run.path / artifact.path, run.id)
        self._in_series = self.rows.folded

    def _write(self, event: Parameters | Alert | Artifact, run: RunDirectory) -> None:
        if isinstance(event, Parameters):
            self.user_run.log_parameters(event.values)
        elif isinstance(event, Alert):
            self.user_run.log_alert(event)
        elif (file := artifact_path(run, event)) is not None:
            self.user_run.log_artifact(event, file, run.id)
