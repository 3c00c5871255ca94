"""The uploader: sends a run's points, alerts and files from its journal to one tracker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from memlog._internal.redact import remember, without_credentials
from memlog.delivery.uploader import outbox
from memlog.delivery.uploader.open_runs import OpenRuns, OpenSink, OwnRun
from memlog.delivery.uploader.outbox import ArtifactFiles
from memlog.delivery.uploader.progress import Cursor, SavedProgress, plan_for
from memlog.errors import (
    DeliveryError,
    RunRefusedError,
    TrackerRejectedError,
    TrackerUnavailableError,
)
from memlog.events import End, ThreadStep
from memlog.journal import Binding, Entry, Header, JournalFile, Position, RunDirectory
from memlog.journal.delivery_state import (
    ClaimOf,
    DeferredRange,
    Progress,
    UploadState,
    deferred_key,
)
from memlog.metrics import is_content, thread_point
from memlog.sink import Connection, Point, Sink, Target, TrackerRun

DELIVERED = ""
"""Key of the delivered points in a tally; the other keys are the reasons why points were lost."""


def send_pending(sink: Sink, cursor: Cursor, *, is_content: bool) -> Counter[str]:
    """Send the cursor's pending points and parameters, and remove them from the cursor.

    If ``is_content`` is True, an unknown error while points are sent counts as a refusal of the points. If
    ``is_content`` is False, the error is raised.

    Returns:
        Number of points delivered, and of points lost, by reason.

    Raises:
        RunRefusedError: the run is deleted, or does not exist.
        TrackerUnavailableError: the tracker can't be reached.
    """
    try:
        sink.probe()
    except TrackerRejectedError as error:
        raise RunRefusedError(str(error)) from error
    if not getattr(sink, "takes_points", True):
        cursor.pending, cursor.parameters = [], []
    tally: Counter[str] = Counter()
    # The sink counts since it was opened, so only the difference belongs to this call.
    tally.subtract(sink.dropped)
    for parameters in cursor.parameters:
        try:
            sink.log_parameters(parameters.values)
        except RunRefusedError:  # noqa: PERF203 - rejected parameters do not stop the others
            raise
        except TrackerRejectedError:
            pass  # the tracker stores the metrics without these parameters
    for begin in range(0, len(cursor.pending), sink.max_points):
        batch = cursor.pending[begin : begin + sink.max_points]
        _send(sink, batch, tally, is_content=is_content)
    cursor.pending, cursor.parameters = [], []
    tally.update(sink.dropped)
    # Without the counts that are 0.
    return +tally


def send_thread_steps(sink: Sink, steps: Sequence[ThreadStep], *, is_content: bool) -> Counter[str]:
    """Send the steps of another thread to the thread's own run. See `send_pending`."""
    tally: Counter[str] = Counter()
    for begin in range(0, len(steps), sink.max_points):
        points = [thread_point(step) for step in steps[begin : begin + sink.max_points]]
        _send(sink, points, tally, is_content=is_content)
    return tally


def _send(sink: Sink, points: Sequence[Point], tally: Counter[str], *, is_content: bool) -> None:
    """Send points. If the tracker refuses them, halve them repeatedly to find the points that it refuses."""
    try:
        sink.log_points(points)
        tally[DELIVERED] += len(points)
    except (TrackerUnavailableError, RunRefusedError):
        raise
    except Exception as error:
        if not isinstance(error, TrackerRejectedError) and not is_content:
            raise
        if len(points) == 1:
            tally[f"rejected: {points[0].name}"] += 1
            return
        middle = len(points) // 2
        _send(sink, points[:middle], tally, is_content=is_content)
        _send(sink, points[middle:], tally, is_content=is_content)


_CONTENT_FAILURES = 5
"""Number of consecutive failed deliveries. After these failures, the uploader drops each point for which the
tracker's client raises an unknown error."""


class Uploader:
    """Uploader of one memlog run to one backend. It begins at the position that the previous uploader saved.

    After each batch, the uploader saves its position in the journal. If the uploader dies, the next uploader
    repeats at most one batch, with the same points.

    If the tracker's run is deleted or does not exist, the uploader skips the segments of the tracker's run,
    and delivers them when the run exists again. Segments of the tracker's other runs do not wait.

    Args:
        run: Folder of memlog's run.
        backend: Name of the backend.
        open_sink: Function that builds a sink for a target. It may import the tracker's client.
        project: Project for a run that the sink opens itself; ``None``: the client's default.
        name: Name of a run that the sink opens itself; ``None``: the tracker chooses one.
        begun_us: Start of a run that the sink opens itself, Unix time in microseconds; ``None``: now.
        may_open_own: True if the sink may open its own run for events outside the user's runs. If it is
            False, these events wait. Set it to True when no further run of the user is expected.
        may_replace: True if a sink may open a new run to replace a run that the tracker refuses.
        claim: Function that takes the id of a user's run and returns the run's `Claim`; ``None``: the
            training process writes to no runs.

    Attributes:
        state: State of the delivery; saved in the run's folder.
        end: How the run ended. Used if the journal has no end event, for example because the disk was full.
    """

    def __init__(
        self,
        run: RunDirectory,
        backend: str,
        open_sink: OpenSink,
        *,
        project: str | None = None,
        name: str | None = None,
        begun_us: int | None = None,
        may_open_own: bool = False,
        may_replace: bool = False,
        claim: ClaimOf | None = None,
    ) -> None:
        self.run = run
        self.backend = backend
        self.may_open_own = may_open_own
        self.end: End | None = None
        self.state = UploadState.load(run, backend)
        self._own = OwnRun(run, self.state)
        begins = Target(
            run.id,
            None,
            project=project,
            name=name,
            begun_us=begun_us,
            continues=self._own.continues,
        )
        self._open_runs = OpenRuns(
            open_sink, self.state, begins, claim, sync=run.command("sync"), may_replace=may_replace
        )
        self._progress = SavedProgress(run, self.state, self._open_runs)
        self._cursors: dict[str, Cursor] = {}
        self._artifact_files = ArtifactFiles(run)
        self._is_final = self._is_worth = False

    def connect(self, connection: Connection) -> None:
        """Set how the tracker's client connects."""
        remember(connection.uri, *connection.environment.values())
        self._open_runs.connect(connection)

    def note_run(self, run: TrackerRun) -> None:
        """Keep the full address of one of the user's runs, in memory only."""
        remember(run.uri)
        self._open_runs.note_run(run)

    def deliver(self, *, complete: bool = False) -> int:
        """Send everything that is ready, and return the number of points.

        Points are made for groups of steps. If the journal is complete, the points of an unfinished group are
        sent, too.

        Raises:
            TrackerUnavailableError: the tracker can't be reached; the remaining data is sent later.
        """
        before, self._is_final = self.state.delivered, complete
        self._open_runs.refused_runs.begin(final=complete)
        try:
            files = {file.process: file for file in self.run.files()}
            for key, deferred in list(self.state.deferred.items()):
                if deferred.process in files:
                    self._deliver_deferred(key, deferred, files[deferred.process])
            for file in files.values():
                self._deliver_file(file, complete=complete)
            outbox.send(
                self.state.outbox,
                self._artifact_files,
                self._sink,
                self._progress.count_and_save,
                self._open_runs.refuse,
            )
        except Exception as error:
            self._cursors.clear()  # read again the data that was read but not sent
            self._progress.note_failure(error)
            if isinstance(error, DeliveryError):
                raise
            problem = without_credentials(f"{type(error).__name__}: {error}")
            raise TrackerUnavailableError(f"{self.backend}: {problem}") from error
        self._progress.failures = 0
        self._progress.note_refusals(complete=complete)
        return self.state.delivered - before

    def describe(self, run_id: str, end: End) -> None:
        """Describe a user's run that ends, while memlog's run may go on. ``end`` is how the run ends."""
        with suppress(RunRefusedError):
            self._open_runs.describe(run_id, partial(_description, self.run, self.backend, end=end))

    @property
    def refused(self) -> str | None:
        """Message with the refused runs, the reasons and the remedy; ``None`` if no run is refused."""
        return self._open_runs.refused_runs.problem

    def close(self) -> None:
        """End the runs that the sinks opened, and close the sinks. Call it after all data is delivered.

        Data for runs that the tracker refuses stays in the journal.
        """
        end = _end_of(self.run, self.end, self.state.ended)
        try:
            self._open_runs.close(
                end, partial(_description, self.run, self.backend), self._newest_run()
            )
        except Exception as error:
            if not self._open_runs.are_durable:
                self._progress.go_back()
                self._cursors.clear()
            self._progress.note_failure(error)
            raise
        self._open_runs.forget()
        self.state.ended = end
        self._progress.mark_safe()
        self._open_runs.refused_runs.end()
        if self.refused:
            self._progress.note_refusals(complete=True)
        elif self.state.own_run or self.state.joined or not self._has_content():
            self.state.stage, self.state.problem = "done", None
            self._progress.save()

    def _newest_run(self) -> str | None:
        """Return the id of the user's run that memlog joined last; ``None``: memlog joined none."""
        newest = None
        for file in self.run.files("trainer"):
            for header in file.headers():
                newest = _run_id(header.bindings.get(self.backend)) or newest
        return newest

    def _deliver_deferred(self, key: str, deferred: DeferredRange, file: JournalFile) -> None:
        """Deliver skipped segments if the tracker now accepts the run to which they belong."""
        cursor = Cursor(deferred.progress, self.backend)
        cursor.target = deferred.target
        try:
            sink = self._sink(deferred.target)
            for entry in file.read(cursor.at):
                if entry.start >= deferred.until:
                    break
                if entry.header is not cursor.header:
                    cursor.header, binding = entry.header, self._binding(file, entry.header)
                    offset = self._own.offset if binding is None else binding.offset
                    cursor.plan_on(entry.header, sink.resolution, offset)
                cursor.take(entry)
                if len(cursor.pending) >= sink.max_points:
                    self._send(key, cursor)
            cursor.finish()
            self._send(key, cursor)
        except RunRefusedError:
            return
        del self.state.deferred[key]
        self._progress.save()

    def _deliver_file(self, file: JournalFile, *, complete: bool) -> None:
        """Deliver one process's segments, and skip those of runs that the tracker refuses."""
        while True:
            try:
                return self._deliver_on(file, complete=complete)
            except RunRefusedError:  # noqa: PERF203 - continue after that run's segments
                if not self._skip(file, self._cursors.pop(file.process)):
                    return None

    def _skip(self, file: JournalFile, cursor: Cursor) -> bool:
        """Skip from a refused run to the next run's segments, and record the skipped segments.

        Return False if the journal has no next run.
        """
        others = (
            segment
            for segment, header in file.headers_after(cursor.segment)
            if _run_id(self._binding(file, header)) != cursor.target
        )
        if (other := next(others, None)) is None:
            return False
        known, begin = self.state.progress(file.process), Position(cursor.since, 0)
        kept = Progress(max(known.sent, begin), max(known.resume, begin), known.open)
        until = Position(other, 0)
        self.state.deferred[deferred_key(file.process, cursor.since)] = DeferredRange(
            file.process, cursor.target, until, kept
        )
        self.state.advance(file.process, Progress(until, until, {}))
        self._progress.save()
        return True

    def _deliver_on(self, file: JournalFile, *, complete: bool) -> None:
        """Deliver one process's segments, from the saved position to the end of the journal."""
        cursor = self._cursors.get(file.process)
        if cursor is None:
            progress = self.state.progress(file.process)
            cursor = self._cursors[file.process] = Cursor(progress, self.backend)
        for entry in file.read(cursor.at):
            if not self._take(file, cursor, entry):
                break
        else:
            if complete:
                cursor.finish()
        self._send(file.process, cursor)

    def _take(self, file: JournalFile, cursor: Cursor, entry: Entry) -> bool:
        """Take one event; return False if the event must wait (see `_switch_run`)."""
        if entry.header is not cursor.header and not self._switch_run(file, cursor, entry):
            return False
        cursor.take(entry)
        if not cursor.skipping and len(cursor.pending) >= self._sink(cursor.target).max_points:
            self._send(file.process, cursor)
        return True

    def _switch_run(self, file: JournalFile, cursor: Cursor, entry: Entry) -> bool:
        """Switch to the run that a segment's events go to; return False if the events must wait.

        Events wait if their run is not known yet, or if the training process writes to the run.
        """
        header = entry.header
        binding = self._binding(file, header)
        if binding is None and not self._own.may_begin(
            is_allowed=self.may_open_own and self._has_content(), is_final=self._is_final
        ):
            return False
        target = _run_id(binding)
        offset = self._own.offset if binding is None else binding.offset
        claim = self._open_runs.claimed(target)
        is_other = (target, offset) != (cursor.target, cursor.offset)
        if claim == "in process" or cursor.plan is None or is_other:
            cursor.finish()
            self._send(file.process, cursor)
            if claim == "in process":
                return False
            cursor.switch_to(target, offset, entry.start.segment)
            cursor.skipping = claim == "whole"
            resolution = "full" if cursor.skipping else self._sink(target).resolution
            cursor.plan = plan_for(header, resolution, offset)
        cursor.header, cursor.segment = header, entry.start.segment
        return True

    def _has_content(self) -> bool:
        """Return whether the journal has more than facts about the process. Such a run is worth opening."""
        self._is_worth = self._is_worth or any(
            is_content(entry.event) for file in self.run.files() for entry in file.read()
        )
        return self._is_worth

    def _binding(self, file: JournalFile, header: Header) -> Binding | None:
        """Return the user's run that a segment's events go to; ``None``: the sink's own run."""
        binding = header.bindings.get(self.backend)
        # Events from before the user's first run go to that run. But if the sink has already opened a run of
        # its own, these events go to the sink's run.
        if binding is None and self.state.own_run is None:
            binding = _first_binding(self.run, self.backend, file)
        if binding is not None:
            self._open_runs.note_binding(binding)
        return binding

    def _sink(self, target: str | None) -> Sink:
        """Return the sink of a target. If this call opens the sink, save the state."""
        is_new = target not in self._open_runs
        sink = self._open_runs.sink(target)
        if is_new:
            self._progress.save()
        return sink

    def _send(self, key: str, cursor: Cursor) -> None:
        """Send a cursor's pending data, and save the new progress.

        ``key`` is the process's name. For skipped segments, ``key`` is the range's `deferred_key`.
        """
        progress = cursor.progress()
        has_pending = cursor.has_pending
        if has_pending:
            sink, is_content = (
                self._sink(cursor.target),
                self._progress.failures >= _CONTENT_FAILURES,
            )
            try:
                tally = send_pending(sink, cursor, is_content=is_content)
            except RunRefusedError as error:
                self._open_runs.refuse(cursor.target, error)
                raise
            tally += self._send_thread_steps(cursor.thread_steps, is_content=is_content)
            self.state.delivered += tally.pop(DELIVERED, 0)
            self._progress.count(tally)
            outbox.take_over(self.state.outbox, cursor.target, cursor.alerts, cursor.artifacts)
            cursor.alerts, cursor.artifacts, cursor.thread_steps = [], [], []
            self.state.stage, self.state.problem = "delivering", self.refused
        if progress != self.state.progress(key):
            self.state.advance(key, progress)
            if has_pending:
                self._progress.save()

    def _send_thread_steps(self, steps: Sequence[ThreadStep], *, is_content: bool) -> Counter[str]:
        """Send steps of threads to the threads' own runs. Steps of a refused run are lost, and counted."""
        tally: Counter[str] = Counter()
        by_run: dict[str, list[ThreadStep]] = {}
        for step in steps:
            by_run.setdefault(step.run_id, []).append(step)
        for run_id, own in by_run.items():
            self._open_runs.note_binding(Binding(run_id, own[0].uri))
            try:
                tally += send_thread_steps(self._sink(run_id), own, is_content=is_content)
            except RunRefusedError:
                tally["thread_run_refused"] += len(own)
        return tally


def _description(
    run: RunDirectory, backend: str, stored: str | None, end: End | None = None
) -> str:
    from memlog.reports.description import description  # noqa: PLC0415 - needed only at the end

    return description(run, backend, stored, end)


def _run_id(binding: Binding | None) -> str | None:
    return None if binding is None else binding.run_id


def _first_binding(run: RunDirectory, backend: str, file: JournalFile) -> Binding | None:
    """Return the user's first run in a process's journal.

    If that journal has no run of the user's, search the journals of the other processes.
    """
    others = (other for other in run.files() if other.process != file.process)
    for candidate in (file, *others):
        for header in candidate.headers():
            if backend in header.bindings:
                return header.bindings[backend]
    return None


def _end_of(run: RunDirectory, reported: End | None, known: End | None) -> End | None:
    """Return how a run ended. A trainer that died without an end event counts as killed at its last write.

    If another rank of the training failed first, its end counts. If the journal lacks the end, for example
    because its disk was full, the end that the trainer has ``reported`` counts, or the end that the tracker
    already knows (``known``).
    """
    end, failure = run.end(), run.rank_failure()
    if failure is not None and failure.run is not None and (end is not None or not run.is_alive()):
        return End(max(failure.time_us, 0 if end is None else end.time_us), failure.status)
    if end is not None:
        return end
    if reported is not None or run.is_alive():
        return reported
    return known or End(int(run.last_write() * 1e6), "killed")
