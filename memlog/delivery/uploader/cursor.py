"""Where an uploader stands in one process's segments."""

from __future__ import annotations

from memlog.events import Alert, Artifact, Parameters
from memlog.journal import Entry, Header, Position
from memlog.journal.delivery_state import Progress
from memlog.metrics import Plan, place
from memlog.sink import Point


class Reading:
    """What an uploader holds in memory of one process's segments."""

    def __init__(self, progress: Progress) -> None:
        self._taken_up = progress
        self.at = progress.resume
        self.sent = progress.sent
        self.pending: list[Point] = []
        self.parameters: list[Parameters] = []
        self.alerts: list[Alert] = []
        self.artifacts: list[Artifact] = []
        self.header: Header | None = None
        self.target: str | None = None
        """Id of the user's run that events go to; ``None``: the sink's own."""
        self.since = self.segment = self.at.segment
        """The segments with which it was turned to that run, and in which it is."""
        self.plan: Plan[Position] | None = None
        self.passing = False
        """Whether what is read is passed over: it has reached its run on another road."""

    def turn(self, target: str | None, segment: int) -> None:
        """What follows, from the beginning of a segment, goes to that run."""
        self.target, self.since, self.segment = target, segment, segment
        self.plan, self.passing = None, False

    def take(self, entry: Entry) -> None:
        """Feeds the plan; what was delivered before is not delivered again."""
        if self.plan is None:
            return
        if self.passing:
            self.at = entry.end
            return
        points = self.plan.feed(entry.event, entry.start) if self._counts(entry) else []
        self.at = entry.end
        if entry.end > self.sent:
            self.pending += points
            if isinstance(entry.event, Parameters):
                self.parameters.append(entry.event)
            elif isinstance(entry.event, Alert):
                self.alerts.append(entry.event)
            elif isinstance(entry.event, Artifact):
                self.artifacts.append(entry.event)

    def _counts(self, entry: Entry) -> bool:
        """Whether an event is new, or belongs to a bucket that was open when reading was taken up."""
        known = self._taken_up
        if entry.end > known.sent or known.open is None:
            return True
        placed = place(entry.event)
        return placed is not None and entry.start >= known.open.get(placed[0], known.sent)

    @property
    def has_something(self) -> bool:
        """Whether anything waits to be handed over."""
        return bool(self.pending or self.parameters or self.alerts or self.artifacts)

    def finish(self) -> None:
        """What is still open is final."""
        if self.plan is not None:
            self.pending += self.plan.flush()

    def progress(self) -> Progress:
        """Where things stand once what is pending has been sent."""
        if self.plan is None:
            return self._taken_up  # nothing was read: a bucket that was open then still is
        sent = max(self.at, self.sent)
        opened = self.plan.open_since
        return Progress(sent=sent, resume=min([sent, *opened.values()]), open=opened)
