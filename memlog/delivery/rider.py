"""Riding: following the journal in the trainer's own process and writing to a run beside the user.

It is the same road that a courier takes, journal to points to tracker, in one thread for all the runs that
a user opens one after another. It keeps itself small: after a ride it waits at least fifty times what the
ride took of the processor.
"""

from __future__ import annotations

import threading
import time

from memlog.delivery.outbox import file_of
from memlog.delivery.rides import RideState
from memlog.delivery.row import Row
from memlog.delivery.series import SERIES_KIND, write_series
from memlog.delivery.state import CourierState
from memlog.events import Alert, Artifact, Event, Parameters
from memlog.events import Health as HealthEvent
from memlog.health import Health
from memlog.journal import Header, JournalFile, Position, RunDirectory
from memlog.journal.format import START
from memlog.lines import say
from memlog.metrics import Plan
from memlog.redact import without_credentials
from memlog.sink import Point, Ride

SHORTEST_PAUSE = 0.01
"""Seconds between rides."""
SHARE = 50
"""A pause is at least so many times the processor time of the ride before it: about 2 % of the trainer's."""
LONGEST_PAUSE = 60.0
_SAVE_INTERVAL = 1.0


class Rider:
    """Rides on a user's runs of one backend. `begin` is called on the thread that publishes.

    Args:
        run: The run's folder.
        backend: The backend's name.
        health: Counts what goes wrong: nothing is raised.
    """

    def __init__(self, run: RunDirectory, backend: str, health: Health) -> None:
        self._run = run
        self._health = health
        self._rides: dict[str, _Ridden] = {}
        self._readings: dict[str, _Reading] = {}
        self._first: str | None = None
        self._complete = threading.Event()
        self._wake = threading.Event()
        self._saved = 0.0
        self._files: list[JournalFile] = []
        self._thread: threading.Thread | None = None
        self.state = RideState(backend=backend)

    def is_over(self, run_id: str) -> bool:
        """Whether the user has ended a run that was ridden: one opened anew has the same id."""
        ridden = self._rides.get(run_id)
        return ridden is not None and not ridden.ride.is_open

    def begin(self, ride: Ride) -> None:
        """The user has a run open; to be called before events are bound to it."""
        self._rides[ride.run_id] = _Ridden(ride)
        self._first = self._first or ride.run_id
        if ride.run_id not in self.state.joined:
            self.state.joined = [*self.state.joined, ride.run_id]
        if self._thread is None:
            name = f"memlog-{self.state.backend}-ride"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def complete(self) -> None:
        """The journal is complete: hand over the rest, and end."""
        self._complete.set()
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Waits for the end, at most ``timeout`` seconds; says whether it came."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        pause = SHORTEST_PAUSE
        while not self._complete.is_set():
            self._wake.wait(pause)
            # Processor time: what it waits for wandb or the disk takes nothing from the trainer.
            begun = time.thread_time()
            self._ride_once()
            self._keep_now_and_then()
            took = time.thread_time() - begun
            pause = min(max(SHORTEST_PAUSE, SHARE * took), LONGEST_PAUSE)
        with self._health.contained("ending a ride"):
            self._files = []
            self._ride_once()  # what came between the last ride and the end
            self._end()

    def _ride_once(self) -> None:
        with self._health.contained("riding"):
            self._files = self._files or self._run.files()
            for file in self._files:
                self._read(file)
            for ridden in list(self._rides.values()):
                self._hand_over(ridden)

    def _read(self, file: JournalFile) -> None:
        reading = self._readings.setdefault(file.process, _Reading())
        for entry in file.read(reading.at):
            if entry.header is not reading.header:
                reading.header = entry.header
                reading.target = self._target(entry.header)
            reading.at = entry.end
            ridden = self._rides.get(reading.target or "")
            if ridden is not None:
                ridden.take(entry.event)

    def _target(self, header: Header) -> str | None:
        """The run that a segment's events go to; what came before the first run goes to that one.

        Unless a run of memlog's own has been opened for it meanwhile, by the helper process.
        """
        binding = header.bindings.get(self.state.backend)
        if binding is not None:
            return binding.run_id
        own = CourierState.load(self._run, self.state.backend).own_run
        return self._first if own is None else None

    def _hand_over(self, ridden: _Ridden) -> None:
        try:
            ridden.ride_once(self._run, self.state)
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            ridden.trouble = without_credentials(f"{type(error).__name__}: {error}")
            if ridden.ride.is_open:
                self._health.fault(f"riding on a run in {self.state.backend}", error)

    def _keep_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._saved >= _SAVE_INTERVAL:
            self._saved = now
            self._files = []  # another process may have begun to write
            with self._health.contained("keeping how far a ride is"):
                self.state.save(self._run)

    def _end(self) -> None:
        for ridden in self._rides.values():
            self._end_ride(ridden)
        missing = [run_id for run_id in self.state.joined if run_id not in self.state.whole]
        if missing:
            self.state.stage = "waiting"
            self.state.problem = (
                f"run {missing[0]} ended before it had everything: `memlog sync {self._run.id}` brings "
                "the whole series, as a run beside it"
            )
            say(self.state.problem)
        else:
            self.state.stage = "done"
        self.state.save(self._run)

    def _end_ride(self, ridden: _Ridden) -> None:
        """Brings the whole series, where rows were too sparse for it, and judges whether all is there."""
        run_id = ridden.ride.run_id
        whole = not ridden.missed and not ridden.waiting
        if ridden.folded and whole:
            whole = ridden.ride.is_open and self._log_series(ridden)
        if whole and run_id not in self.state.whole:
            self.state.whole = [*self.state.whole, run_id]

    def _log_series(self, ridden: _Ridden) -> bool:
        name = f"series-{ridden.ride.run_id}.csv"
        try:
            artifact = write_series(self._run, name, lambda header: self._is_of(header, ridden))
            ridden.ride.log_artifact(artifact, self._run.path / artifact.path, self._run.id)
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            self._health.fault(f"bringing the whole series to {self.state.backend}", error)
            return False
        say(
            f"{ridden.folded} steps share a row of run {ridden.ride.run_id} with a later one, since it "
            f"has fewer rows than steps: peaks are kept, and the artifact {name} ({SERIES_KIND}) has "
            "every step"
        )
        return True

    def _is_of(self, header: Header, ridden: _Ridden) -> bool:
        return self._target(header) == ridden.ride.run_id


class _Reading:
    """Where the rider stands in one process's segments."""

    def __init__(self) -> None:
        self.at: Position = START
        self.header: Header | None = None
        self.target: str | None = None


class _Ridden:
    """A run of the user's, and what waits to be put into its rows."""

    def __init__(self, ride: Ride) -> None:
        self.ride = ride
        self.missed = 0
        """Points that came too late: the user had ended the run."""
        self.trouble: str | None = None
        self._row = Row()
        self._points: list[Point] = []
        self._others: list[Parameters | Alert | Artifact] = []

    @property
    def folded(self) -> int:
        """Steps that share a row with a later one."""
        return self._row.folded

    @property
    def waiting(self) -> bool:
        """Whether something could not be handed over."""
        return bool(self._points or self._others)

    def take(self, event: Event) -> None:
        """Takes in an event of the journal's."""
        if isinstance(event, HealthEvent) and not self.ride.is_open:
            return  # memlog's own state at the end is nothing that a run lacks
        # A plan for each event: points of a step that is still open are handed over as well, and folded
        # with what follows.
        plan: Plan[int] = Plan("full")
        points = plan.feed(event, 0) + plan.flush()
        if isinstance(event, (Parameters, Alert, Artifact)):
            self._others.append(event)
        self._points += points

    def ride_once(self, run: RunDirectory, state: RideState) -> None:
        """Puts everything that waits into the row that the user commits next."""
        if not self.waiting:
            return
        if not self.ride.is_open:
            self.missed += len(self._points) + len(self._others)
            self._points, self._others = [], []
            return
        if self._points:
            before = self.folded
            self._row.ride(self.ride, self._points)
            state.delivered += len(self._points)
            state.folded += self.folded - before
            self._points = []
        # Files last: while the server is away a file alone is waited for, and then fails.
        for other in sorted(self._others, key=lambda event: isinstance(event, Artifact)):
            self._hand_over_other(other, run)
            self._others.remove(other)

    def _hand_over_other(self, event: Parameters | Alert | Artifact, run: RunDirectory) -> None:
        if isinstance(event, Parameters):
            self.ride.log_parameters(event.values)
        elif isinstance(event, Alert):
            self.ride.log_alert(event)
        elif (file := file_of(event, run)) is not None:
            self.ride.log_artifact(event, file, run.id)
