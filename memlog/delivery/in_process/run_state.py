"""State of one run that is written in process: what it has, what waits for it, whether it is complete."""

from __future__ import annotations

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.in_process.row_buffer import UsersRows
from memlog.delivery.uploader.artifact_files import file_of
from memlog.events import Alert, Artifact, Event, Parameters, Sample
from memlog.events import Health as HealthEvent
from memlog.journal import RunDirectory
from memlog.sink import InProcessRun

_MAX_OTHERS = 1000
"""Alerts and files that wait for a run at most; a run that lacks more than these lacks them all the same."""


class RunState:
    """One run, by its id: the user may end it and open it anew, and what it lacked then is not forgotten.

    Args:
        user_run: The way to it.
        diagnostics: Counts what goes wrong.

    Attributes:
        user_run: The way to it; to the newest one, where the user opened it more than once.
        ended: Whether the user has ended it and the tracker's client came to the end of that.
        rows: What its rows get.
    """

    def __init__(self, user_run: InProcessRun, diagnostics: Diagnostics) -> None:
        self.user_run = user_run
        self.ended = False
        self.rows = UsersRows(diagnostics)
        self._diagnostics = diagnostics
        self._others: list[Parameters | Alert | Artifact] = []
        self._in_series = 0
        self._begin()

    @property
    def delivered(self) -> int:
        """Points handed over, before folding."""
        return self.rows.delivered

    @property
    def folded(self) -> int:
        """Steps that share a row with a later one."""
        return self.rows.folded

    @property
    def is_waiting(self) -> bool:
        """Whether something was not handed over yet, or never can be: the user has ended the run.

        What waits for a row of a run that is open gets one, at the latest as that ends.
        """
        rows_come = self.is_watched and self.user_run.is_open
        return bool(self._others) or (self.rows.is_waited_for and not rows_come)

    @property
    def needs_series(self) -> bool:
        """Whether its rows are too sparse for what was recorded, and no series has told the rest."""
        return self.folded > self._in_series

    @property
    def is_whole(self) -> bool:
        """Whether the tracker has everything of it so far."""
        return not self.is_waiting and not self.needs_series

    def resume(self, user_run: InProcessRun) -> None:
        """The user has opened it anew."""
        self.user_run, self.ended = user_run, False
        self._begin()

    def _begin(self) -> None:
        self.is_watched = False
        with self._diagnostics.contained("asking to be told of the user's rows"):
            self.rows.open(self.user_run.watch_rows(self.rows))
            self.is_watched = True

    def hear(self, event: Event) -> None:
        """Takes what this process publishes while the run is its newest."""
        if self._is_wanted(event):
            self.rows.hear(event)

    def take(self, event: Event, *, heard: bool) -> None:
        """Takes in an event of the journal's.

        Args:
            event: The event.
            heard: Whether it was heard as it was published: its values are on their way.
        """
        if not heard and self._is_wanted(event):
            self.rows.add(event)
        if isinstance(event, (Parameters, Alert, Artifact)) and len(self._others) < _MAX_OTHERS:
            self._others.append(event)

    def _is_wanted(self, event: Event) -> bool:
        """What memlog says of itself and reads between steps is nothing that an ended run lacks."""
        return self.user_run.is_open or not isinstance(event, (HealthEvent, Sample))

    def bring_others(self, run: RunDirectory) -> None:
        """Hands over what goes into no row."""
        self.rows.fold_heard()
        if not self._others or not self.user_run.is_open:
            return
        # Files last: while the server is away a file alone is waited for, and then fails.
        for other in sorted(self._others, key=lambda event: isinstance(event, Artifact)):
            self._hand_over(other, run)
            self._others.remove(other)

    def put_rest(self, *, final: bool = True) -> None:
        """Puts what waits into the user's run, on the user's thread.

        Args:
            final: Whether the user logs nothing more. Otherwise what is behind their last row waits for the
                next one: a row of memlog's would keep them from logging to that last one again.
        """
        if not self.is_watched or not self.user_run.is_open:
            return
        with self._diagnostics.contained("putting the last values into the user's run"):
            if points := self.rows.rest():
                self.user_run.log(points, new_row=False)
            if final and (points := self.rows.behind()):
                self.user_run.log(points, new_row=True)
            if not self.rows.is_waited_for:
                self.user_run.leave_rows()

    def bring_series(self, artifact: Artifact, run: RunDirectory) -> None:
        """Hands over the whole series, which has everything that was taken in so far."""
        self.user_run.log_artifact(artifact, run.path / artifact.path, run.id)
        self._in_series = self.folded

    def _hand_over(self, event: Parameters | Alert | Artifact, run: RunDirectory) -> None:
        if isinstance(event, Parameters):
            self.user_run.log_parameters(event.values)
        elif isinstance(event, Alert):
            self.user_run.log_alert(event)
        elif (file := file_of(event, run)) is not None:
            self.user_run.log_artifact(event, file, run.id)
