"""Position of an uploader in one process's journal segments, and the data that it has read but not sent."""

from __future__ import annotations

from memlog.events import Alert, Artifact, Parameters, ThreadStep
from memlog.journal import Entry, Header, Position
from memlog.journal.delivery_state import Progress
from memlog.metrics import Plan, alert_in_run, axis_and_index, parameters_of
from memlog.sink import Point, Resolution


def plan_for(header: Header, resolution: Resolution, offset: int) -> Plan[Position]:
    """Return the plan that converts a segment's events to points.

    The plan uses the metric names of the memlog version that wrote the segment. `memlog.journal.Binding`
    explains ``offset``. Buckets begin at the number that the session's first step has in the tracker's run,
    or at 0 if that step is not in the run.
    """
    initial_step = max(header.initial_step - offset, 0)
    return Plan(resolution, initial_step, older=header.has_older_names, offset=offset)


class Cursor:
    """Position in one process's journal segments, and the data that was read but not sent.

    The first position is that of the saved progress. Points wait until their bucket is complete. A bucket is
    a group of steps (or epochs, or evaluations) for which the tracker gets one point of each metric.
    """

    def __init__(self, progress: Progress, backend: str) -> None:
        self._saved = progress
        self._backend = backend
        self.at = progress.resume
        self.sent = progress.sent
        self.pending: list[Point] = []
        self.thread_steps: list[ThreadStep] = []
        self.parameters: list[Parameters] = []
        self.alerts: list[Alert] = []
        self.artifacts: list[Artifact] = []
        self.header: Header | None = None
        self.target: str | None = None
        """Id of the user's run that events go to; ``None``: the sink's own run."""
        self.offset = 0
        """`memlog.journal.Binding.offset` of the run that events go to."""
        self.since = self.segment = self.at.segment
        """``segment``: number of the present segment. ``since``: number of the segment at which the cursor
        began, or at which `switch_to` was last called."""
        self.plan: Plan[Position] | None = None
        self.skipping = False
        """True if events are skipped, because the training process has already written them to the run."""

    def switch_to(self, target: str | None, offset: int, segment: int) -> None:
        """Set `target` and `offset` for the events of segment ``segment`` and of later segments."""
        self.target, self.since, self.segment = target, segment, segment
        self.plan, self.skipping, self.offset = None, False, offset

    def plan_on(self, header: Header, resolution: Resolution, offset: int) -> None:
        """Complete all buckets and make a new plan, if there is no plan or ``offset`` has changed."""
        if self.plan is None or offset != self.offset:
            self.finish()
            self.offset, self.plan = offset, plan_for(header, resolution, offset)

    def take(self, entry: Entry) -> None:
        """Take one event. Keep its points, parameters and alerts to be sent, unless they were sent before."""
        if self.plan is None:
            return
        if self.skipping:
            self.at = entry.end
            return
        points = self.plan.feed(entry.event, entry.start) if self._counts(entry) else []
        self.at = entry.end
        if entry.end > self.sent:
            self.pending += points
            if isinstance(entry.event, Alert):
                self.alerts.append(alert_in_run(entry.event, self.offset))
            elif isinstance(entry.event, ThreadStep):
                if entry.event.backend == self._backend:
                    self.thread_steps.append(entry.event)
            elif isinstance(entry.event, Artifact):
                self.artifacts.append(entry.event)
            elif (parameters := parameters_of(entry.event)) is not None:
                self.parameters.append(parameters)

    def _counts(self, entry: Entry) -> bool:
        """Return whether an event may belong to a point that was not sent yet."""
        known = self._saved
        if entry.end > known.sent or known.open is None:
            return True
        on_axis = axis_and_index(entry.event)
        return on_axis is not None and entry.start >= known.open.get(on_axis[0], known.sent)

    @property
    def has_pending(self) -> bool:
        rare = self.parameters or self.alerts or self.artifacts or self.thread_steps
        return bool(self.pending or rare)

    def finish(self) -> None:
        """Complete all buckets, and add their points to the pending points."""
        if self.plan is not None:
            self.pending += self.plan.flush()

    def progress(self) -> Progress:
        """Return the progress to save when all pending data is sent."""
        if self.plan is None:
            return self._saved  # nothing was read, so incomplete points are still incomplete
        sent = max(self.at, self.sent)
        opened = self.plan.open_since
        return Progress(sent=sent, resume=min([sent, *opened.values()]), open=opened)
