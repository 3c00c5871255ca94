"""Writing what the journal gets to a run of the user's, in the trainer's own process.

The values of this process's own events are added to what the user logs, on the user's thread, as they log it
(`memlog.delivery.in_process.row_buffer`): at any other moment another thread can't know which of the user's
rows is open. Everything else (what the helper process samples, alerts, files) takes the way that an uploader
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

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.delivery.in_process.messages import ended_early, kept_nowhere, shared_rows
from memlog.delivery.in_process.run_state import RunState
from memlog.delivery.in_process.saved_state import InProcessState
from memlog.delivery.in_process.series_csv import write_series
from memlog.delivery.in_process.throttle import SHORTEST_PAUSE, Pace
from memlog.events import Event
from memlog.journal import Header, RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.journal.follower import Follower
from memlog.sink import InProcessRun

END_TIMEOUT = 10.0
"""Seconds that a user who ends a run waits for memlog's last words to it, at most."""
_POLL = 0.1
"""Seconds between looks at whether a thread that is waited for still lives."""
_SAVE_INTERVAL = 1.0


class InProcessWriter:
    """Writes to a user's runs of one backend. `begin` is called on the thread that publishes.

    Args:
        run: The run's folder.
        backend: The backend's name.
        diagnostics: Counts what goes wrong: nothing is raised.
    """

    def __init__(self, run: RunDirectory, backend: str, diagnostics: Diagnostics) -> None:
        self._run = run
        self._diagnostics = diagnostics
        self._run_states: dict[str, RunState] = {}
        self._newest: RunState | None = None
        self._disabled: set[str] = set()
        self._follower = Follower(run, self._target)
        self._ending: deque[tuple[InProcessRun, threading.Event]] = deque()
        self._complete = threading.Event()
        self._wake = threading.Event()
        self._saved = 0.0
        self._thread: threading.Thread | None = None
        self.state = InProcessState(backend=backend)

    def is_over(self, run_id: str) -> bool:
        """Whether the user has ended a run that was written: one opened anew has the same id."""
        run_state = self._run_states.get(run_id)
        return run_state is not None and not run_state.user_run.is_open

    def hear(self, event: Event) -> None:
        """Takes each event as this process publishes it, on the publisher's thread."""
        if self._newest is not None:
            self._newest.hear(event)

    def begin(self, user_run: InProcessRun, *, kept: bool = True) -> None:
        """The user has a run open; to be called before events are bound to it.

        Args:
            user_run: The way to it.
            kept: Whether the tracker keeps anything of it: the user may have disabled it.
        """
        if not kept:
            self._disabled.add(user_run.run_id)
        self._newest = self._join(user_run) if kept else None
        if user_run.run_id not in self.state.joined:
            self.state.joined = [*self.state.joined, user_run.run_id]
        if self._thread is None:
            name = f"memlog-{self.state.backend}-writer"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._thread = thread
        with self._diagnostics.contained("asking to be told of a run's end"):
            user_run.watch_end(
                lambda: self._before_end(user_run), lambda: self._after_end(user_run)
            )

    def _join(self, user_run: InProcessRun) -> RunState:
        run_state = self._run_states.get(user_run.run_id)
        if run_state is None:
            run_state = self._run_states[user_run.run_id] = RunState(user_run, self._diagnostics)
        else:
            run_state.resume(user_run)
        # wandb ends what is open at exit without telling. Handlers run in the opposite order of their
        # registration: this one after the session's, which is registered anew, and before wandb's.
        atexit.unregister(run_state.put_rest)
        atexit.register(run_state.put_rest)
        return run_state

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
        for run_state in self._run_states.values():
            run_state.put_rest(final=False)
            if not run_state.rows.is_waited_for:
                atexit.unregister(run_state.put_rest)
        with self._diagnostics.contained("keeping what was written in process"):
            self._keep(over=True)
        return True

    def _before_end(self, user_run: InProcessRun) -> None:
        """On the user's thread, which ends the run: waits until it has what it can get."""
        self._wait_for_what_it_can_get(user_run)
        run_state = self._run_states.get(user_run.run_id)
        if run_state is not None and run_state.user_run is user_run:
            run_state.put_rest()

    def _wait_for_what_it_can_get(self, user_run: InProcessRun) -> None:
        if self._complete.is_set() or self._thread is None or not self._thread.is_alive():
            return
        done = threading.Event()
        self._ending.append((user_run, done))
        self._wake.set()
        deadline = time.monotonic() + END_TIMEOUT
        while not done.wait(_POLL) and self._thread.is_alive() and time.monotonic() < deadline:
            pass

    def _after_end(self, user_run: InProcessRun) -> None:
        """Likewise: the run has come to its end in order."""
        run_state = self._run_states.get(user_run.run_id)
        if run_state is not None and run_state.user_run is user_run:
            run_state.ended = True
            atexit.unregister(run_state.put_rest)

    def _work(self) -> None:
        pace, pause = Pace(), SHORTEST_PAUSE
        while not self._complete.is_set():
            self._wake.wait(pause)
            self._wake.clear()
            # Processor time: what it waits for wandb or the disk takes nothing from the trainer.
            begun = time.thread_time()
            # Before the journal is read: what was published until then is what they wait for.
            ending = self._take_ending()
            self._write_once()
            self._bring_what_ends(ending)
            self._keep_now_and_then()
            pause = pace.pause(time.thread_time() - begun)
        with self._diagnostics.contained("ending the writing in process"):
            self._follower.look_again()
            self._write_once()  # what came between the last pass and the end
            self._end()

    def _write_once(self) -> None:
        with self._diagnostics.contained("writing in process"):
            for run_id, header, event in self._follower.news():
                if (run_state := self._run_states.get(run_id)) is not None:
                    run_state.take(event, heard=self._is_heard(header))
            for run_state in list(self._run_states.values()):
                self._hand_over(run_state)

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
        own = UploadState.load(self._run, self.state.backend).own_run
        return next(iter(self.state.joined), None) if own is None else None

    def _hand_over(self, run_state: RunState) -> None:
        try:
            run_state.bring_others(self._run)
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            if run_state.user_run.is_open:
                self._diagnostics.fault(f"writing to a run in {self.state.backend}", error)

    def _take_ending(self) -> list[tuple[InProcessRun, threading.Event]]:
        """The runs whose users wait in their end."""
        return [self._ending.popleft() for _ in range(len(self._ending))]

    def _bring_what_ends(self, ending: Iterable[tuple[InProcessRun, threading.Event]]) -> None:
        """A user waits in the end of a run, for what it can only be told now."""
        for user_run, done in ending:
            run_state = self._run_states.get(user_run.run_id)
            if run_state is not None and run_state.user_run is user_run:
                self._bring_series(run_state)
                self._saved = 0.0
            done.set()

    def _keep_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._saved >= _SAVE_INTERVAL:
            self._saved = now
            self._follower.look_again()
            with self._diagnostics.contained("keeping what was written in process"):
                self._keep(over=False)

    def _keep(self, *, over: bool) -> None:
        """Saves what was written; one that may still go on is not called whole."""
        every = list(self._run_states.values())
        self.state.delivered = sum(run_state.delivered for run_state in every)
        self.state.folded = sum(run_state.folded for run_state in every)
        self.state.whole = [
            run_id
            for run_id, run_state in self._run_states.items()
            if run_state.is_whole and (over or run_state.ended)
        ] + sorted(self._disabled)
        self.state.save(self._run)

    def _end(self) -> None:
        for run_state in self._run_states.values():
            self._bring_series(run_state)
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
        run_state = self._run_states.get(run_id)
        return run_id in self._disabled or (run_state is not None and run_state.is_whole)

    def _bring_series(self, run_state: RunState) -> None:
        """Brings the whole series, where rows were too sparse for it and the run can still take it."""
        if run_state.is_waiting or not run_state.needs_series or not run_state.user_run.is_open:
            return
        run_id = run_state.user_run.run_id
        name = f"series-{run_id}.csv"
        try:
            artifact = write_series(self._run, name, lambda header: self._target(header) == run_id)
            run_state.bring_series(artifact, self._run)
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            self._diagnostics.fault(f"bringing the whole series to {self.state.backend}", error)
        else:
            say(shared_rows(run_state.folded, run_id, name))
