"""Riding: writing to a run beside the user, in the trainer's own process, what the journal gets.

The values of this process's own events are added to what the user logs, on the user's thread, as they log it
(`memlog.delivery.in_process.row_buffer`): at any other moment another thread can't know which of the user's
rows is open. Everything else (what the helper process samples, alerts, files) takes the road that a courier
takes, through the journal, in one thread for all the runs that a user opens one after another. It keeps
itself small (`memlog.delivery.in_process.throttle`).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Iterable

from memlog._internal.diagnostics import Health
from memlog._internal.terminal import say
from memlog.delivery.in_process.messages import ended_early, kept_nowhere, shared_rows
from memlog.delivery.in_process.run_state import Ridden
from memlog.delivery.in_process.saved_state import RideState
from memlog.delivery.in_process.series_csv import write_series
from memlog.delivery.in_process.throttle import SHORTEST_PAUSE, Pace
from memlog.events import Event
from memlog.journal import Header, RunDirectory
from memlog.journal.delivery_state import CourierState
from memlog.journal.follower import Follower
from memlog.sink import Ride

END_TIMEOUT = 10.0
"""Seconds that a user who ends a run waits for memlog's last words to it, at most."""
_POLL = 0.1
"""Seconds between looks at whether a thread that is waited for still lives."""
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
        self._ridden: dict[str, Ridden] = {}
        self._newest: Ridden | None = None
        self._disabled: set[str] = set()
        self._follower = Follower(run, self._target)
        self._ending: deque[tuple[Ride, threading.Event]] = deque()
        self._complete = threading.Event()
        self._wake = threading.Event()
        self._saved = 0.0
        self._thread: threading.Thread | None = None
        self.state = RideState(backend=backend)

    def is_over(self, run_id: str) -> bool:
        """Whether the user has ended a run that was ridden: one opened anew has the same id."""
        ridden = self._ridden.get(run_id)
        return ridden is not None and not ridden.ride.is_open

    def hear(self, event: Event) -> None:
        """Takes each event as this process publishes it, on the publisher's thread."""
        if self._newest is not None:
            self._newest.hear(event)

    def begin(self, ride: Ride, *, kept: bool = True) -> None:
        """The user has a run open; to be called before events are bound to it.

        Args:
            ride: The way to it.
            kept: Whether the tracker keeps anything of it: the user may have disabled it.
        """
        if not kept:
            self._disabled.add(ride.run_id)
        self._newest = self._join(ride) if kept else None
        if ride.run_id not in self.state.joined:
            self.state.joined = [*self.state.joined, ride.run_id]
        if self._thread is None:
            name = f"memlog-{self.state.backend}-ride"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._thread = thread
        with self._health.contained("asking to be told of a run's end"):
            ride.watch_end(lambda: self._before_end(ride), lambda: self._after_end(ride))

    def _join(self, ride: Ride) -> Ridden:
        ridden = self._ridden.get(ride.run_id)
        if ridden is None:
            ridden = self._ridden[ride.run_id] = Ridden(ride, self._health)
        else:
            ridden.resume(ride)
        # wandb ends what is open at exit without telling. Handlers run in the opposite order of their
        # registration: this one after the session's, which is registered anew, and before wandb's.
        atexit.unregister(ridden.put_rest)
        atexit.register(ridden.put_rest)
        return ridden

    def complete(self) -> None:
        """The journal is complete: hand over the rest, and end."""
        self._complete.set()
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Waits for the end, at most ``timeout`` seconds; says whether it came. On the user's thread."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        for ridden in self._ridden.values():
            ridden.put_rest(final=False)
            if not ridden.rows.is_waited_for:
                atexit.unregister(ridden.put_rest)
        with self._health.contained("keeping how far a ride is"):
            self._keep(over=True)
        return True

    def _before_end(self, ride: Ride) -> None:
        """On the user's thread, which ends the run: waits until it has what it can get."""
        self._wait_for_what_it_can_get(ride)
        ridden = self._ridden.get(ride.run_id)
        if ridden is not None and ridden.ride is ride:
            ridden.put_rest()

    def _wait_for_what_it_can_get(self, ride: Ride) -> None:
        if self._complete.is_set() or self._thread is None or not self._thread.is_alive():
            return
        done = threading.Event()
        self._ending.append((ride, done))
        self._wake.set()
        deadline = time.monotonic() + END_TIMEOUT
        while not done.wait(_POLL) and self._thread.is_alive() and time.monotonic() < deadline:
            pass

    def _after_end(self, ride: Ride) -> None:
        """Likewise: the run has come to its end in order."""
        ridden = self._ridden.get(ride.run_id)
        if ridden is not None and ridden.ride is ride:
            ridden.ended = True
            atexit.unregister(ridden.put_rest)

    def _work(self) -> None:
        pace, pause = Pace(), SHORTEST_PAUSE
        while not self._complete.is_set():
            self._wake.wait(pause)
            self._wake.clear()
            # Processor time: what it waits for wandb or the disk takes nothing from the trainer.
            begun = time.thread_time()
            # Before the journal is read: what was published until then is what they wait for.
            ending = self._take_ending()
            self._ride_once()
            self._bring_what_ends(ending)
            self._keep_now_and_then()
            pause = pace.pause(time.thread_time() - begun)
        with self._health.contained("ending a ride"):
            self._follower.look_again()
            self._ride_once()  # what came between the last ride and the end
            self._end()

    def _ride_once(self) -> None:
        with self._health.contained("riding"):
            for run_id, header, event in self._follower.news():
                if (ridden := self._ridden.get(run_id)) is not None:
                    ridden.take(event, heard=self._is_heard(header))
            for ridden in list(self._ridden.values()):
                self._hand_over(ridden)

    def _is_heard(self, header: Header) -> bool:
        """Whether a segment's events were heard as they were published: since a run was joined."""
        return header.process.pid == os.getpid() and self.state.backend in header.bindings

    def _target(self, header: Header) -> str | None:
        """The run that a segment's events go to; what came before the first run goes to that one.

        Unless a run of memlog's own has been opened for it meanwhile, by the helper process.
        """
        binding = header.bindings.get(self.state.backend)
        if binding is not None:
            return binding.run_id
        own = CourierState.load(self._run, self.state.backend).own_run
        return next(iter(self.state.joined), None) if own is None else None

    def _hand_over(self, ridden: Ridden) -> None:
        try:
            ridden.bring_others(self._run)
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            if ridden.ride.is_open:
                self._health.fault(f"riding on a run in {self.state.backend}", error)

    def _take_ending(self) -> list[tuple[Ride, threading.Event]]:
        """The runs whose users wait in their end."""
        return [self._ending.popleft() for _ in range(len(self._ending))]

    def _bring_what_ends(self, ending: Iterable[tuple[Ride, threading.Event]]) -> None:
        """A user waits in the end of a run, for what it can only be told now."""
        for ride, done in ending:
            ridden = self._ridden.get(ride.run_id)
            if ridden is not None and ridden.ride is ride:
                self._bring_series(ridden)
                self._saved = 0.0
            done.set()

    def _keep_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._saved >= _SAVE_INTERVAL:
            self._saved = now
            self._follower.look_again()
            with self._health.contained("keeping how far a ride is"):
                self._keep(over=False)

    def _keep(self, *, over: bool) -> None:
        """Saves how far the rides are; one that may still go on is not called whole."""
        every = list(self._ridden.values())
        self.state.delivered = sum(ridden.delivered for ridden in every)
        self.state.folded = sum(ridden.folded for ridden in every)
        self.state.whole = [
            run_id
            for run_id, ridden in self._ridden.items()
            if ridden.is_whole and (over or ridden.ended)
        ] + sorted(self._disabled)
        self.state.save(self._run)

    def _end(self) -> None:
        for ridden in self._ridden.values():
            self._bring_series(ridden)
        self.state.stage = "done"
        missing = [run_id for run_id in self.state.joined if not self._is_whole(run_id)]
        if missing:
            self.state.stage = "waiting"
            self.state.problem = ended_early(missing, self._run.id)
            say(self.state.problem)
        elif self._disabled:
            self.state.problem = kept_nowhere(sorted(self._disabled))
            say(self.state.problem)
        self._keep(over=True)

    def _is_whole(self, run_id: str) -> bool:
        ridden = self._ridden.get(run_id)
        return run_id in self._disabled or (ridden is not None and ridden.is_whole)

    def _bring_series(self, ridden: Ridden) -> None:
        """Brings the whole series, where rows were too sparse for it and the run can still take it."""
        if ridden.is_waiting or not ridden.needs_series or not ridden.ride.is_open:
            return
        run_id = ridden.ride.run_id
        name = f"series-{run_id}.csv"
        try:
            artifact = write_series(self._run, name, lambda header: self._target(header) == run_id)
            ridden.bring_series(artifact, self._run)
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            self._health.fault(f"bringing the whole series to {self.state.backend}", error)
        else:
            say(shared_rows(ridden.folded, run_id, name))
