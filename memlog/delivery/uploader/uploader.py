"""Carrying a run's points from its journal to one tracker."""

from __future__ import annotations

from collections import Counter

import msgspec

from memlog._internal.redact import remember, without_credentials
from memlog.delivery.in_process.saved_state import ClaimOf
from memlog.delivery.uploader import outbox
from memlog.delivery.uploader.artifact_files import Copies
from memlog.delivery.uploader.cursor import Reading
from memlog.delivery.uploader.open_runs import OpenSink, Targets
from memlog.delivery.uploader.send import DELIVERED, send_pending
from memlog.errors import DeliveryError, RunRefusedError, TrackerUnavailableError
from memlog.events import End
from memlog.journal import Binding, Entry, Header, JournalFile, Position, RunDirectory
from memlog.journal.delivery_state import DeferredRange, Progress, UploadState, held_name
from memlog.metrics import Plan
from memlog.sink import Connection, Sink, Target, TrackerRun

_STUBBORN_FAILURES = 5
"""So many failures of a tracker that answers its probe mean that the content is at fault."""


class Uploader:
    """Delivers one run to one backend, from where the last uploader stopped.

    What it hands over is decided by the journal alone. Its place in the journal is saved after each
    batch, so that an uploader that dies repeats at most one batch, with the same points.

    Of a run that the tracker refuses, because it is deleted or gone, the segments are passed over and
    remembered: they are delivered when it is there again, and nothing else waits for that.

    Args:
        run: The run.
        backend: The backend's name.
        open_sink: Builds a sink for a target; may import the tracker's client.
        project: Passed to a run that the sink opens itself.
        name: Likewise.
        begun_us: Likewise: when the run began, Unix time in microseconds.
        may_open_own: Whether events that no run of the user's claims may go to a run of its own; until
            then they wait. Set it when waiting is over.
        may_replace: Whether what a run can't take, since the tracker refuses it, goes to one of the sink's
            own.
        claim: If the user's runs are written in the trainer's process: what a run of the user's has.

    Attributes:
        state: What it remembers; saved in the run's folder.
        end: How the run ended, where that was told and its journal found no room for it.
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
        begins = Target(run.id, None, project=project, name=name, begun_us=begun_us)
        self._targets = Targets(open_sink, self.state, begins, claim, may_replace=may_replace)
        self._readings: dict[str, Reading] = {}
        self._failures = 0
        self._copies = Copies(run)
        self.state.provisional = 0  # of an uploader that did not come to close its sink: sent again
        self._clean = self._kept()

    def connect(self, connection: Connection) -> None:
        """Says how the tracker's client is to connect."""
        remember(connection.uri, *connection.environment.values())
        self._targets.connect(connection)

    def know(self, run: TrackerRun) -> None:
        """Remembers, in memory only, the full address of a run of the user's."""
        remember(run.uri)
        self._targets.know(run)

    def deliver(self, *, complete: bool = False) -> int:
        """Hands over everything that is ready, and returns the number of points.

        Args:
            complete: The journal is complete: what is still open is final now.

        Raises:
            TrackerUnavailableError: the rest must wait; nothing is lost.
        """
        before = self.state.delivered
        self._targets.refusals.begin(final=complete)
        try:
            files = {file.process: file for file in self.run.files()}
            for place, stretch in list(self.state.held.items()):
                self._deliver_held(place, stretch, files.get(stretch.process))
            for file in files.values():
                self._deliver_file(file, complete=complete)
            self._send_outbox()
        except Exception as error:
            self._readings.clear()  # what was read but not handed over is read again
            self._note_failure(error)
            if isinstance(error, DeliveryError):
                raise
            problem = without_credentials(f"{type(error).__name__}: {error}")
            raise TrackerUnavailableError(f"{self.backend}: {problem}") from error
        self._failures = 0
        self._tell_refusals(complete=complete)
        return self.state.delivered - before

    @property
    def refused(self) -> str | None:
        """Which runs the tracker refuses, why, and the remedy; ``None`` where it refuses none."""
        return self._targets.refusals.problem

    def close(self) -> None:
        """Ends the run that the sink opened and gives back what sinks hold: all is delivered.

        All but what is for runs that the tracker refuses.
        """
        end = self._end()
        try:
            self._targets.close(end)
        except Exception as error:
            self._go_back()
            self._note_failure(error)
            raise
        self._targets.forget()
        self._clean = self._kept()
        self._targets.refusals.end()
        if self.refused:
            self._tell_refusals(complete=True)
        elif self.state.own_run or self.state.joined:
            self.state.stage, self.state.problem = "done", None
            self._save()

    def _tell_refusals(self, *, complete: bool) -> None:
        """Keeps which runs are refused: everything else is delivered."""
        before = self.state.stage, self.state.problem
        self._targets.refusals.end()
        if self.refused and (complete or self.state.stage == "unreachable"):
            self.state.stage = "waiting"
        if self.state.stage != "unreachable":
            self.state.problem = self.refused
        if (self.state.stage, self.state.problem) != before:
            self._save()

    def _go_back(self) -> None:
        """Where a sink could not make safe what it had: a new one sends all since the last clean point."""
        if not self._targets.are_durable:
            clean = self._clean
            self.state.files, self.state.outbox = dict(clean.files), clean.outbox
            self.state.delivered, self.state.dropped = clean.delivered, dict(clean.dropped)
            self.state.held = dict(clean.held)
            self._clean = self._kept()
            self._targets.forget()
            self._readings.clear()

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self.state.failed_attempts += 1
        self.state.stage = "unreachable"
        self.state.problem = without_credentials(str(error) or type(error).__name__)
        self._save()

    def _kept(self) -> UploadState:
        """A copy of what is remembered."""
        return msgspec.convert(msgspec.to_builtins(self.state), UploadState)

    def _save(self) -> None:
        """Keeps what is remembered; of what a sink has not made safe yet, that it is not."""
        clean, state = self._clean, self.state
        if not self._targets.are_durable:
            state = msgspec.structs.replace(
                state,
                files=clean.files,
                outbox=clean.outbox,
                delivered=clean.delivered,
                dropped=clean.dropped,
                held=clean.held,
                provisional=state.delivered - clean.delivered,
            )
        state.save(self.run)

    def _end(self) -> End | None:
        """How the run ended; a process that is gone without saying so was killed at its last write."""
        files = self.run.files()
        # The helper process says it where the trainer's journal found no room.
        for file in sorted(files, key=lambda file: not file.process.startswith("trainer")):
            last = max(file.segments, default=1)
            for entry in file.read(Position(last - 1, 0)):
                if isinstance(entry.event, End):
                    return entry.event
        if self.end is not None or self.run.is_alive():
            return self.end
        return End(int(self.run.last_write() * 1e6), "killed")

    def _deliver_held(self, place: str, stretch: DeferredRange, file: JournalFile | None) -> None:
        """Delivers what was passed over, where the tracker takes it now."""
        reading = Reading(stretch.progress)
        reading.target = stretch.target
        try:
            sink = self._sink(stretch.target)
            for entry in file.read(reading.at) if file is not None else ():
                if entry.start >= stretch.until:
                    break
                if reading.plan is None:
                    reading.plan = Plan(sink.resolution, entry.header.initial_step)
                reading.take(entry)
                if len(reading.pending) >= sink.max_points:
                    self._hand_over(place, reading)
            reading.finish()
            self._hand_over(place, reading)
        except RunRefusedError:
            return
        del self.state.held[place]
        self._save()

    def _deliver_file(self, file: JournalFile, *, complete: bool) -> None:
        while True:
            try:
                return self._deliver_on(file, complete=complete)
            except RunRefusedError:  # noqa: PERF203 - it goes on behind that run
                if not self._pass_over(file, self._readings.pop(file.process)):
                    return None

    def _pass_over(self, file: JournalFile, reading: Reading) -> bool:
        """Goes on behind the segments of a run that is refused; ``False`` where nothing is there yet."""
        others = (
            segment
            for segment, header in file.headers_after(reading.segment)
            if self._target(file, header) != reading.target
        )
        if (other := next(others, None)) is None:
            return False
        known, begin = self.state.progress(file.process), Position(reading.since, 0)
        kept = Progress(max(known.sent, begin), max(known.resume, begin), known.open)
        until = Position(other, 0)
        self.state.held[held_name(file.process, reading.since)] = DeferredRange(
            file.process, reading.target, until, kept
        )
        self.state.advance(file.process, Progress(until, until, {}))
        self._save()
        return True

    def _deliver_on(self, file: JournalFile, *, complete: bool) -> None:
        reading = self._readings.get(file.process)
        if reading is None:
            progress = self.state.progress(file.process)
            reading = self._readings[file.process] = Reading(progress)
        for entry in file.read(reading.at):
            if not self._take(file, reading, entry):
                break
        else:
            if complete:
                reading.finish()
        self._hand_over(file.process, reading)

    def _take(self, file: JournalFile, reading: Reading, entry: Entry) -> bool:
        """Reads one event; ``False`` where it must wait for a run to go to."""
        if entry.header is not reading.header and not self._turn(file, reading, entry):
            return False
        reading.take(entry)
        if reading.passing:
            return True
        if len(reading.pending) >= self._sink(reading.target).max_points:
            self._hand_over(file.process, reading)
        return True

    def _turn(self, file: JournalFile, reading: Reading, entry: Entry) -> bool:
        """Turns to the run that a segment's events go to; ``False`` where none is known yet."""
        header = entry.header
        binding = self._binding(file, header)
        if binding is None and self.state.own_run is None and not self.may_open_own:
            return False
        target = binding.run_id if binding else None
        claim = self._targets.claimed(target)
        if claim == "in process" or reading.plan is None or target != reading.target:
            reading.finish()
            self._hand_over(file.process, reading)
            if claim == "in process":
                return False
            reading.turn(target, entry.start.segment)
            reading.passing = claim == "whole"
            resolution = "full" if reading.passing else self._sink(target).resolution
            reading.plan = Plan(resolution, header.initial_step)
        reading.header, reading.segment = header, entry.start.segment
        return True

    def _binding(self, file: JournalFile, header: Header) -> Binding | None:
        """The user's run that claims a segment's events; ``None``: no run of the user's does.

        What was published before the first run appeared goes to that run, unless a run of the sink's
        own has been opened for it meanwhile.
        """
        binding = header.bindings.get(self.backend)
        if binding is None and self.state.own_run is None:
            binding = self._first_binding(file)
        if binding is not None:
            self._targets.meet(binding)
        return binding

    def _target(self, file: JournalFile, header: Header) -> str | None:
        binding = self._binding(file, header)
        return binding.run_id if binding else None

    def _first_binding(self, file: JournalFile) -> Binding | None:
        others = (other for other in self.run.files() if other.process != file.process)
        for candidate in (file, *others):
            for header in candidate.headers():
                if self.backend in header.bindings:
                    return header.bindings[self.backend]
        return None

    def _sink(self, target: str | None) -> Sink:
        """The open sink of a target.

        Raises:
            RunRefusedError: the tracker refuses the run.
        """
        is_new = target not in self._targets
        sink = self._targets.sink(target)
        if is_new:
            self._save()
        return sink

    def _hand_over(self, place: str, reading: Reading) -> None:
        """Sends what is pending and remembers that it is sent.

        Raises:
            RunRefusedError: the tracker refuses the run; that is noted.
        """
        progress = reading.progress()
        anything = reading.has_something
        if anything:
            self._sink(reading.target)
            with self._targets.noting(reading.target) as sink:
                stubborn = self._failures >= _STUBBORN_FAILURES
                tally = send_pending(sink, reading, stubborn=stubborn)
            self.state.delivered += tally.pop(DELIVERED, 0)
            self._count(tally)
            outbox.take_over(self.state.outbox, reading.target, reading.alerts, reading.artifacts)
            reading.alerts, reading.artifacts = [], []
            self.state.stage, self.state.problem = "delivering", self.refused
        if progress != self.state.progress(place):
            self.state.advance(place, progress)
            if anything:
                self._save()

    def _count(self, lost: Counter[str]) -> None:
        for reason, count in lost.items():
            self.state.dropped[reason] = self.state.dropped.get(reason, 0) + count

    def _send_outbox(self) -> None:
        def crossed_off(lost: Counter[str]) -> None:
            self._count(lost)
            self._save()

        outbox.send(self.state.outbox, self._copies, self._sink, crossed_off, self._targets.refuse)
