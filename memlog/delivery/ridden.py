"""A run of the user's that is ridden: what it has got, what waits for it, and whether it has everything."""

from __future__ import annotations

from memlog.delivery.copies import file_of
from memlog.delivery.row import Row
from memlog.events import Alert, Artifact, Event, Parameters, Sample
from memlog.events import Health as HealthEvent
from memlog.journal import RunDirectory
from memlog.metrics import Plan
from memlog.sink import Ride

_MAX_OTHERS = 1000
"""Alerts and files that wait for a run at most; a run that lacks more than these lacks them all the same."""


class Ridden:
    """One run, by its id: the user may end it and open it anew, and what it lacked then is not forgotten.

    Attributes:
        ride: The way to it; to the newest one, where the user opened it more than once.
        ended: Whether the user has ended it and the tracker's client came to the end of that.
        delivered: Points handed over, before folding.
    """

    def __init__(self, ride: Ride) -> None:
        self.ride = ride
        self.ended = False
        self.delivered = 0
        self._row = Row()
        self._points = 0
        self._others: list[Parameters | Alert | Artifact] = []
        self._in_series = 0

    @property
    def folded(self) -> int:
        """Steps that share a row with a later one."""
        return self._row.folded

    @property
    def is_waiting(self) -> bool:
        """Whether something was not handed over yet, or never can be: the user has ended the run."""
        return self._row.is_waited_for or bool(self._others)

    @property
    def needs_series(self) -> bool:
        """Whether its rows are too sparse for what was recorded, and no series has told the rest."""
        return self.folded > self._in_series

    @property
    def is_whole(self) -> bool:
        """Whether the tracker has everything of it so far."""
        return not self.is_waiting and not self.needs_series

    def resume(self, ride: Ride) -> None:
        """The user has opened it anew."""
        self.ride, self.ended = ride, False
        self._row.renew()

    def take(self, event: Event) -> None:
        """Takes in an event of the journal's."""
        if isinstance(event, (HealthEvent, Sample)) and not self.ride.is_open:
            return  # what memlog says of itself and reads between steps is nothing that an ended run lacks
        # A plan for each event: points of a step that is still open are handed over as well, and folded
        # with what follows.
        plan: Plan[int] = Plan("full")
        points = plan.feed(event, 0) + plan.flush()
        self._points += len(points)
        self._row.add(points)
        if isinstance(event, (Parameters, Alert, Artifact)) and len(self._others) < _MAX_OTHERS:
            self._others.append(event)

    def ride_once(self, run: RunDirectory) -> None:
        """Puts everything that waits into the row that the user commits next."""
        if not self.is_waiting or not self.ride.is_open:
            return
        if self._row.is_waited_for:
            self._row.ride(self.ride)
            self.delivered += self._points
            self._points = 0
        # Files last: while the server is away a file alone is waited for, and then fails.
        for other in sorted(self._others, key=lambda event: isinstance(event, Artifact)):
            self._hand_over(other, run)
            self._others.remove(other)

    def bring_series(self, artifact: Artifact, run: RunDirectory) -> None:
        """Hands over the whole series, which has everything that was taken in so far."""
        self.ride.log_artifact(artifact, run.path / artifact.path, run.id)
        self._in_series = self.folded

    def _hand_over(self, event: Parameters | Alert | Artifact, run: RunDirectory) -> None:
        if isinstance(event, Parameters):
            self.ride.log_parameters(event.values)
        elif isinstance(event, Alert):
            self.ride.log_alert(event)
        elif (file := file_of(event, run)) is not None:
            self.ride.log_artifact(event, file, run.id)
