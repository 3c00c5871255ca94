"""Progress of an uploader: its position in the journal, data that is not sent yet, and its saved state."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memlog._internal.redact import without_credentials
from memlog.delivery.uploader.open_runs import OpenRuns
from memlog.events import Alert, Artifact, Parameters, ThreadStep, UsersNumber
from memlog.journal import Entry, Header, Position, RunDirectory
from memlog.journal.delivery_state import Progress, UploadState
from memlog.metrics import Plan, alert_in_run, axis_and_index, parameters_of
from memlog.sink import USERS_NUMBER, Point, Resolution


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
            elif isinstance(entry.event, UsersNumber):
                self._take_number(entry.event)
            elif isinstance(entry.event, Artifact):
                self.artifacts.append(entry.event)
            elif (parameters := parameters_of(entry.event)) is not None:
                self.parameters.append(parameters)

    def _take_number(self, event: UsersNumber) -> None:
        if (event.backend, event.run_id) == (self._backend, self.target):
            point = Point(USERS_NUMBER, event.own, "step", event.number, event.time_us)
            self.pending.append(point)

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


class SavedProgress:
    """An uploader's state, and a copy of the last state in which all delivered data was stored safely.

    Attributes:
        failures: Number of failed deliveries since the last successful delivery.
    """

    def __init__(self, run: RunDirectory, state: UploadState, open_runs: OpenRuns) -> None:
        self._run = run
        self._state = state
        self._open_runs = open_runs
        self.failures = 0
        # If an earlier uploader did not close its sink, its provisional points are sent again.
        state.provisional = 0
        self.mark_safe()

    def mark_safe(self) -> None:
        """Keep a copy of the present state as the last safe one."""
        self._safe = msgspec.convert(msgspec.to_builtins(self._state), UploadState)

    def go_back(self) -> None:
        """Return to the last safe state, and drop the open sinks. Data sent since then is sent again."""
        safe = self._safe
        self._state.files, self._state.outbox = dict(safe.files), safe.outbox
        self._state.delivered, self._state.dropped = safe.delivered, dict(safe.dropped)
        self._state.deferred = dict(safe.deferred)
        self.mark_safe()
        self._open_runs.forget()

    def save(self) -> None:
        """Save the state. If an open sink can still lose data, the saved progress is the last safe one."""
        safe, state = self._safe, self._state
        if not self._open_runs.are_durable:
            state = msgspec.structs.replace(
                state,
                files=safe.files,
                outbox=safe.outbox,
                delivered=safe.delivered,
                dropped=safe.dropped,
                deferred=safe.deferred,
                provisional=state.delivered - safe.delivered,
            )
        state.save(self._run)

    def count(self, lost: Mapping[str, int]) -> None:
        """Add counts of lost data, by reason."""
        for reason, count in lost.items():
            self._state.dropped[reason] = self._state.dropped.get(reason, 0) + count

    def count_and_save(self, lost: Mapping[str, int]) -> None:
        """Save that alerts or a file were sent. ``lost`` counts the lost items, by reason."""
        self.count(lost)
        self.save()

    def note_failure(self, error: Exception) -> None:
        """Save that a delivery failed, and the reason."""
        self.failures += 1
        self._state.failed_attempts += 1
        self._state.stage = "unreachable"
        self._state.problem = without_credentials(str(error) or type(error).__name__)
        self.save()

    def note_refusals(self, *, complete: bool) -> None:
        """Save the message about runs that the tracker refuses. Call it when all other data is delivered."""
        state, refused_runs = self._state, self._open_runs.refused_runs
        before = state.stage, state.problem
        refused_runs.end()
        if refused_runs.problem and (complete or state.stage == "unreachable"):
            state.stage = "waiting"
        if state.stage != "unreachable":
            state.problem = refused_runs.problem
        if (state.stage, state.problem) != before:
            self.save()
