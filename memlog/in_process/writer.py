"""The in-process writer: writes events to a run of the user's, in the trainer's own process.

When the user logs a row, the values of this process's own events are added to that row
(`memlog.in_process.row_buffer`). This happens on the user's thread, because another thread can't know which
of the user's rows is open. memlog's own thread reads all other data (samples by the helper process, alerts,
files) from the journal, as an uploader does. One thread serves all runs that the user opens.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper import protocol
from memlog.delivery.helper.protocol import Settling
from memlog.events import Event
from memlog.in_process.written_runs import RunState, WrittenRuns
from memlog.journal import RunDirectory
from memlog.journal.runs import Follower
from memlog.sink import InProcessRun

INTERVAL = 0.1
"""Seconds between passes over the journal. At 1,000 steps a second the passes take 0.6 % of a processor."""
_MOST_OWN_WORK = 10.0
"""Maximum seconds by which memlog delays the end of a user's run if memlog itself, and not the tracker's
client, takes more than `memlog.delivery.helper.protocol.SETTLED_WITHIN`, for example on a busy machine."""
_POLL = 0.1
"""Seconds between checks that the writer's thread lives, while the user's thread waits for it."""
_SAVE_INTERVAL = 1.0
"""Minimum seconds between two saves of the state."""


@dataclass(eq=False)
class _Ending:
    """Work of the writer's thread for a run that the user ends."""

    user_run: InProcessRun
    settling: Settling | None
    """The helper's work, for which the writer's thread waits; ``None``: it does not wait."""
    is_last: bool
    """True: write the run's series. If the helper process has made no report in time, write it, too."""
    done: threading.Event = field(default_factory=threading.Event)


class InProcessWriter:
    """Writer to the user's runs of one backend. Its errors are counted, and never raised.

    Call `begin` on the thread that publishes. The first call of `begin` calls ``subscribe`` with a function.
    This function gets all later events. When the user ends a run, the writer calls ``settle`` with the run's
    id, so that the verdict on the steps so far is published. When the user logs a run's first row, the writer
    calls ``number_first`` with the run's id and the arguments of `UsersRows.number_first`.
    """

    def __init__(
        self,
        run: RunDirectory,
        backend: str,
        subscribe: Callable[[Callable[[Event], object]], object],
        diagnostics: Diagnostics,
        settle: Callable[[str], Settling | None] = lambda _: None,
        number_first: Callable[[str, int | None, int | None], int] = lambda *_: 0,
    ) -> None:
        self._run = run
        self._settle = settle
        self._number_first = number_first
        self._backend = backend
        self._subscribe = subscribe
        self._diagnostics = diagnostics
        self._runs = WrittenRuns(run, backend, diagnostics)
        self._newest: RunState | None = None
        self._follower = Follower(run, self._runs.target)
        self._ending: deque[_Ending] = deque()
        self._complete = threading.Event()
        self._wake = threading.Event()
        self._saved = 0.0
        self._thread: threading.Thread | None = None

    def is_over(self, run_id: str) -> bool:
        """Return whether the user has ended a run that this writer wrote to, and has not opened it again."""
        run_state = self._runs.get(run_id)
        return run_state is not None and not run_state.user_run.is_open

    def count_from(self, run_id: str, offset: int) -> None:
        """Set `memlog.journal.Binding.offset` of a run. Call this method before the run's first step."""
        run_state = self._runs.get(run_id)
        if run_state is not None:
            run_state.offset = offset

    def begin(self, user_run: InProcessRun, *, kept: bool = True) -> None:
        """Begin to write to a run that the user has opened. Call it before events are bound to the run.

        ``kept`` is False if the user has disabled the run, so that the tracker keeps nothing of it.
        """
        if kept:
            self._newest = run_state = self._runs.add(user_run)
            run_state.rows.number_first = partial(self._number_first, user_run.run_id)
            # wandb ends open runs at exit without calling the run's hooks. Handlers at exit run in the
            # opposite order of their registration. This handler is registered again here, and the session's
            # handler after it. So this handler runs after the session's and before wandb's.
            atexit.unregister(run_state.put_remaining)
            atexit.register(run_state.put_remaining)
        else:
            self._newest = None
            self._runs.add_disabled(user_run.run_id)
        if self._thread is None:
            self._subscribe(self._receive)
            thread = threading.Thread(
                target=self._work, name=f"memlog-{self._backend}-writer", daemon=True
            )
            thread.start()
            self._thread = thread
        with self._diagnostics.contained("beginning to watch for a run's end"):
            user_run.watch_end(
                lambda: self._before_end(user_run), lambda: self._after_end(user_run)
            )

    def complete(self) -> None:
        """Tell the thread that the journal is complete. The thread writes the remaining data and ends."""
        self._complete.set()
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until the thread ends.

        If the thread has ended, write the remaining values and return True. Otherwise, write nothing and
        return False. Call this method on the user's thread.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        for run_state in self._runs:
            run_state.put_remaining(final=False)
            if not run_state.rows.has_waiting:
                atexit.unregister(run_state.put_remaining)
        with self._diagnostics.contained("saving what was written in process"):
            self._runs.save(over=True)
        return True

    def _receive(self, event: Event) -> None:
        """Pass one of this process's own events to the newest run. Called on the publisher's thread."""
        if self._newest is not None:
            self._newest.receive(event)

    def _before_end(self, user_run: InProcessRun) -> None:
        """Settle the run's verdict, and write all remaining data. Called on the user's thread.

        The run ends afterwards, at the latest about `protocol.SETTLED_WITHIN` seconds later
        if the tracker's client hangs.
        """
        run_state = self._runs.current(user_run)
        if run_state is None:
            return
        settled, deadline = None, time.monotonic() + protocol.SETTLED_WITHIN
        if self._is_working:
            settled = self._settle(user_run.run_id)
            self._ask_thread(_Ending(user_run, settled, is_last=False), deadline)
        run_state.close()
        run_state.put_remaining()
        if self._is_working:
            self._ask_thread(_Ending(user_run, settled, is_last=True), deadline)

    @property
    def _is_working(self) -> bool:
        return not self._complete.is_set() and self._thread is not None and self._thread.is_alive()

    def _ask_thread(self, ending: _Ending, deadline: float) -> None:
        """Wait until the writer's thread has made one more pass, with the work for a run that ends."""
        self._ending.append(ending)
        self._wake.set()
        while self._is_working and not ending.done.is_set():
            late = time.monotonic() - deadline
            if late >= (0.0 if self._runs.client_hangs else _MOST_OWN_WORK):
                return
            ending.done.wait(_POLL if late >= 0 else min(-late, _POLL))

    def _after_end(self, user_run: InProcessRun) -> None:
        """Mark a run as ended. Called on the user's thread after the run has ended normally."""
        run_state = self._runs.current(user_run)
        if run_state is not None:
            run_state.ended = True
            atexit.unregister(run_state.put_remaining)

    def _work(self) -> None:
        while not self._complete.is_set():
            self._wake.wait(INTERVAL)
            self._wake.clear()
            # The ending runs are taken before the journal is read. If a run ends later, this pass may miss
            # the run's last events.
            ending = [self._ending.popleft() for _ in range(len(self._ending))]
            self._write_once()
            self._write_to_ending(ending)
            self._save_if_due()
        with self._diagnostics.contained("ending the writing in process"):
            self._follower.look_again()
            self._write_once()  # events between the last pass and the end
            self._runs.end()

    def _write_once(self) -> None:
        with self._diagnostics.contained("writing in process"):
            for run_id, header, event in self._follower.news():
                if (run_state := self._runs.get(run_id)) is not None:
                    # `_receive` got the events that this process published after a run was opened.
                    is_own = header.process.pid == os.getpid() and self._backend in header.bindings
                    run_state.take(event, received=is_own)
            for run_state in self._runs:
                try:
                    with self._runs.calls_client():
                        run_state.write_others(self._run)
                except Exception as error:  # noqa: BLE001, PERF203 - the tracker's client may raise anything
                    if run_state.user_run.is_open:
                        self._diagnostics.fault(f"writing to a run in {self._backend}", error)

    def _write_to_ending(self, ending: Sequence[_Ending]) -> None:
        """Write what runs still lack that are being ended, and let the user's threads go on."""
        for each in ending:
            run_state = self._runs.current(each.user_run)
            if run_state is not None and each.is_last:
                self._runs.write_series(run_state)
                if not run_state.has_report:
                    end = None if each.settling is None else each.settling.end
                    self._runs.write_report(run_state, end)
                self._saved = 0.0
            elif each.settling is not None:
                each.settling.wait()
                self._follower.look_again()
                self._write_once()
                if run_state is not None:
                    self._runs.write_origin(run_state)
            each.done.set()

    def _save_if_due(self) -> None:
        now = time.monotonic()
        if now - self._saved >= _SAVE_INTERVAL:
            self._saved = now
            self._follower.look_again()
            with self._diagnostics.contained("saving what was written in process"):
                self._runs.save(over=False)
