"""Carrying a run's points from its journal to one tracker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from memlog.delivery import outbox
from memlog.delivery.copies import Copies
from memlog.delivery.reading import Reading
from memlog.delivery.rides import Claim, ClaimOf
from memlog.delivery.state import CourierState, Progress
from memlog.errors import DeliveryError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import End
from memlog.journal import Binding, Entry, Header, JournalFile, Position, RunDirectory
from memlog.metrics import Plan
from memlog.redact import bare_address, remember, without_credentials
from memlog.sink import Connection, Point, Sink, Target, TrackerRun

OpenSink = Callable[[Target], Sink]

_STUBBORN_FAILURES = 5
"""So many failures of a tracker that answers its probe mean that the content is at fault."""
_DELIVERED = ""
"""Beside the reasons for drops in a tally."""


class Courier:
    """Delivers one run to one backend, from where the last courier stopped.

    What it hands over is decided by the journal alone. Its place in the journal is saved after each
    batch, so that a courier that dies repeats at most one batch, with the same points.

    Args:
        run: The run.
        backend: The backend's name.
        open_sink: Builds a sink for a target; may import the tracker's client.
        project: Passed to a run that the sink opens itself.
        name: Likewise.
        begun_us: Likewise: when the run began, Unix time in microseconds.
        may_open_own: Whether events that no run of the user's claims may go to a run of its own; until
            then they wait. Set it when waiting is over.
        claim: Where the user's runs are ridden, in the trainer's process: what a run of the user's has.

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
        claim: ClaimOf | None = None,
    ) -> None:
        self.run = run
        self.backend = backend
        self.may_open_own = may_open_own
        self.end: End | None = None
        self.state = CourierState.load(run, backend)
        self._connection = Connection()
        self._open_sink = open_sink
        self._claim = claim
        self._project = project
        self._name = name
        self._begun_us = begun_us
        self._uris: dict[str, str | None] = {}
        self._sinks: dict[str | None, Sink] = {}
        self._readings: dict[str, Reading] = {}
        self._failures = 0
        self._copies = Copies(run)
        self.state.provisional = 0  # of a courier that did not come to close its sink: sent again
        self._clean = self._kept()

    def connect(self, connection: Connection) -> None:
        """Says how the tracker's client is to connect."""
        remember(connection.uri, *connection.environment.values())
        self._connection = connection

    def know(self, run: TrackerRun) -> None:
        """Remembers, in memory only, the full address of a run of the user's."""
        remember(run.uri)
        self._uris[run.run_id] = run.uri

    def deliver(self, *, complete: bool = False) -> int:
        """Hands over everything that is ready, and returns the number of points.

        Args:
            complete: The journal is complete: what is still open is final now.

        Raises:
            TrackerUnavailableError: the rest must wait; nothing is lost.
        """
        before = self.state.delivered
        try:
            for file in self.run.files():
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
        return self.state.delivered - before

    def close(self) -> None:
        """Ends the run that the sink opened and gives back what sinks hold: all is delivered."""
        end = self._end()
        if self.state.own_run is not None:
            self._sink(None)  # opened by an earlier courier, which died before it could end it
        try:
            for sink in self._sinks.values():
                sink.close(end.status if end else None, end.time_us if end else None)
        except Exception as error:
            self._go_back()
            self._note_failure(error)
            raise
        self._sinks.clear()
        self._clean = self._kept()
        if self.state.own_run or self.state.joined:
            self.state.stage, self.state.problem = "done", None
            self._save()

    def _go_back(self) -> None:
        """Where a sink could not make safe what it had: a new one sends all since the last clean point."""
        if not self._are_durable():
            clean = self._clean
            self.state.files, self.state.outbox = dict(clean.files), clean.outbox
            self.state.delivered, self.state.dropped = clean.delivered, dict(clean.dropped)
            self._clean = self._kept()
            self._sinks.clear()
            self._readings.clear()

    def _are_durable(self) -> bool:
        return all(sink.durable for sink in self._sinks.values())

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self.state.stage = "unreachable"
        self.state.problem = without_credentials(str(error) or type(error).__name__)
        self._save()

    def _kept(self) -> CourierState:
        """A copy of what is remembered."""
        return msgspec.convert(msgspec.to_builtins(self.state), CourierState)

    def _save(self) -> None:
        """Keeps what is remembered; of what a sink has not made safe yet, that it is not."""
        clean, state = self._clean, self.state
        if not self._are_durable():
            state = msgspec.structs.replace(
                state,
                files=clean.files,
                outbox=clean.outbox,
                delivered=clean.delivered,
                dropped=clean.dropped,
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

    def _deliver_file(self, file: JournalFile, *, complete: bool) -> None:
        reading = self._readings.get(file.process)
        if reading is None:
            progress = self.state.files.get(file.process, Progress())
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
        if entry.header is not reading.header and not self._turn(file, reading, entry.header):
            return False
        reading.take(entry)
        if reading.passing:
            return True
        if len(reading.pending) >= self._sink(reading.target).max_points:
            self._hand_over(file.process, reading)
        return True

    def _turn(self, file: JournalFile, reading: Reading, header: Header) -> bool:
        """Turns to the run that a segment's events go to; ``False`` where none is known yet."""
        binding = self._binding(file, header)
        if binding is None and self.state.own_run is None and not self.may_open_own:
            return False
        target = binding.run_id if binding else None
        claim = self._claimed(target)
        if claim == "riding" or reading.plan is None or target != reading.target:
            reading.finish()
            self._hand_over(file.process, reading)
            if claim == "riding":
                return False
            reading.target = target
            reading.passing = claim == "whole"
            resolution = "full" if reading.passing else self._sink(target).resolution
            reading.plan = Plan(resolution, header.initial_step)
        reading.header = header
        return True

    def _claimed(self, target: str | None) -> Claim | None:
        """What a run of the user's has that is ridden; ``None``: the courier delivers to it."""
        return None if target is None or self._claim is None else self._claim(target)

    def _binding(self, file: JournalFile, header: Header) -> Binding | None:
        """The user's run that claims a segment's events; ``None``: no run of the user's does.

        What was published before the first run appeared goes to that run, unless a run of the sink's
        own has been opened for it meanwhile.
        """
        binding = header.bindings.get(self.backend)
        if binding is None and self.state.own_run is None:
            binding = self._first_binding(file)
        if binding is not None:
            self._uris.setdefault(binding.run_id, binding.uri)
        return binding

    def _first_binding(self, file: JournalFile) -> Binding | None:
        others = (other for other in self.run.files() if other.process != file.process)
        for candidate in (file, *others):
            for header in candidate.headers():
                if self.backend in header.bindings:
                    return header.bindings[self.backend]
        return None

    def _sink(self, target: str | None) -> Sink:
        if target in self._sinks:
            return self._sinks[target]
        users = None if target is None else TrackerRun(target, self._uris.get(target))
        beside = users if self._claimed(target) else None
        own = None if target is not None else self.state.own_run
        sink = self._open_sink(
            Target(
                memlog_run=self.run.id,
                joined=None if beside else users,
                beside=beside,
                opened=TrackerRun(own.run_id, own.uri) if own is not None else None,
                project=self._project,
                name=self._name,
                begun_us=self._begun_us,
                connection=self._connection,
            )
        )
        sink.probe()
        opened = sink.open()
        self._sinks[target] = sink
        self._remember(target, opened)
        return sink

    def _remember(self, target: str | None, opened: TrackerRun) -> None:
        # Beside a run of the user's that is not written to any more, the sink has opened another one.
        if target is not None and opened.run_id not in self.state.joined:
            self.state.joined = [*self.state.joined, opened.run_id]
        if target is None:
            uri = None if opened.uri is None else bare_address(opened.uri)
            self.state.own_run = Binding(opened.run_id, uri)
        self.state.stage, self.state.problem = "delivering", None
        self._save()

    def _hand_over(self, process: str, reading: Reading) -> None:
        """Sends what is pending and remembers that it is sent."""
        progress = reading.progress()
        anything = reading.has_something
        if anything:
            tally = self._send_pending(self._sink(reading.target), reading)
            self.state.delivered += tally.pop(_DELIVERED, 0)
            self._count(tally)
            outbox.take_over(self.state.outbox, reading.target, reading.alerts, reading.artifacts)
            reading.alerts, reading.artifacts = [], []
            self.state.stage, self.state.problem = "delivering", None
        if progress != self.state.files.get(process, Progress()):
            self.state.files[process] = progress
            if anything:
                self._save()

    def _count(self, lost: Counter[str]) -> None:
        for reason, count in lost.items():
            self.state.dropped[reason] = self.state.dropped.get(reason, 0) + count

    def _send_outbox(self) -> None:
        def crossed_off(lost: Counter[str]) -> None:
            self._count(lost)
            self._save()

        outbox.send(self.state.outbox, self._copies, self._sink, crossed_off)

    def _send_pending(self, sink: Sink, reading: Reading) -> Counter[str]:
        sink.probe()
        tally: Counter[str] = Counter()
        tally.subtract(sink.dropped)
        for parameters in reading.parameters:
            with suppress(TrackerRejectedError):  # the metrics are taken all the same
                sink.log_parameters(parameters.values)
        for begin in range(0, len(reading.pending), sink.max_points):
            self._send(sink, reading.pending[begin : begin + sink.max_points], tally)
        reading.pending, reading.parameters = [], []
        tally.update(sink.dropped)
        return +tally

    def _send(self, sink: Sink, points: Sequence[Point], tally: Counter[str]) -> None:
        """Hands points over; where the tracker refuses them, finds those that it refuses."""
        try:
            sink.log_points(points)
            tally[_DELIVERED] += len(points)
        except TrackerUnavailableError:
            raise
        except Exception as error:
            if not isinstance(error, TrackerRejectedError) and self._failures < _STUBBORN_FAILURES:
                raise
            if len(points) == 1:
                tally[f"rejected: {points[0].name}"] += 1
                return
            middle = len(points) // 2
            self._send(sink, points[:middle], tally)
            self._send(sink, points[middle:], tally)
