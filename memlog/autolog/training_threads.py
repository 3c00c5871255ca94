"""Steps of threads that train at the same time. Only one thread's steps are the session's steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlog.autolog.optimizer_steps import OptimizerClock

INACTIVE_AFTER = 10
INACTIVE_SECONDS = 1.0
"""The leading thread is inactive if, since its last step, another thread has made `INACTIVE_AFTER` steps, and
this time has passed. Of threads that share a processor, one may make many steps in the other's pause."""


class TrainingThreads:
    """Threads that step optimizers. One leads: its steps are the session's steps.

    Each thread has a clock of its own, so optimizers of different threads do not mix. Another thread takes
    the lead if the leading thread has ended, if its optimizer is deleted, or if it is inactive. The main
    thread takes the lead in any case, and keeps it: what a helper thread trains beside it is not the
    program's training. If both have trained at the same time, the other thread takes the lead only with a
    step that the leading thread has not reached. So four threads with 300 steps each make 300 steps.

    Args:
        leading: Clock of the leading thread. If another thread takes the lead, this object gets the state of
            the other thread's clock.
        make_clock: Function that takes the function for counted steps, and returns a new clock.
    """

    def __init__(
        self,
        leading: OptimizerClock,
        make_clock: Callable[[Callable[[Any], None]], OptimizerClock],
    ) -> None:
        self.on_other_step: Callable[[], object] = int
        """Function called after a step of a thread that does not lead. It must not raise."""
        self._leading = leading
        self._on_step: Callable[[Any], None] | None = None
        self._lock = threading.RLock()
        self._make_clock = make_clock
        self._others: dict[int, _OtherThread] = {}

    def other_clock(self) -> OptimizerClock | None:
        """Return the clock of the calling thread; ``None`` if the thread leads, or if no thread leads yet."""
        leads, number = self._leading.thread, threading.get_ident()
        if leads is None or leads.number == number:
            return None
        if self._leading.on_step != self._pass_on:
            self._on_step, self._leading.on_step = self._leading.on_step, self._pass_on
        known = self._others.get(number)
        # The system may give a new thread the number of a thread that has ended.
        if known is None or known.identity.has_ended:
            known = self._others[number] = self._new(ThreadIdentity())
        return known.clock

    def _pass_on(self, optimizer: Any) -> None:
        """Pass on a step of the leading thread, so that another one can't take the lead within it."""
        with self._lock:
            if self._on_step is not None:
                self._on_step(optimizer)

    def _new(self, identity: ThreadIdentity) -> _OtherThread:
        made = _OtherThread(identity, self._leading.total)
        made.clock = self._make_clock(lambda optimizer: self._stepped(made, optimizer))
        return made

    def _stepped(self, other: _OtherThread, optimizer: Any) -> None:
        """Count a step of another thread. If the thread takes the lead, this step is the session's."""
        leading, lock = self._leading, self._lock
        other.count(leading.total)
        is_parallel = leading.total > other.first_total
        may_lead = not is_parallel or other.total > leading.total
        # The main thread can evaluate for minutes. If it has not stepped since the other one began, it waits.
        pauses = is_parallel and leading.thread is not None and leading.thread.is_main
        is_left = leading.has_ended or (other.is_alone and not pauses)
        may_lead = may_lead and (is_left or other.identity.is_main)
        # If the lock is taken, the leading thread is within a step.
        if not may_lead or not lock.acquire(blocking=False):
            self.on_other_step()
            return
        try:
            self._take_lead(other)
            leading.on_step(optimizer)
        finally:
            lock.release()

    def _take_lead(self, other: _OtherThread) -> None:
        leading, identity = self._leading, self._leading.thread
        del self._others[other.identity.number]
        if identity is None:
            return
        before = self._new(identity)
        total = before.total = leading.total
        leading.exchange(before.clock)
        leading.exchange(other.clock)
        leading.thread, leading.total = other.identity, total + 1
        if not identity.has_ended:
            self._others[identity.number] = before


class ThreadIdentity:
    """The calling thread."""

    def __init__(self) -> None:
        self.number = threading.get_ident()
        self._thread = weakref.ref(threading.current_thread())

    @property
    def is_main(self) -> bool:
        return self.number == threading.main_thread().ident

    @property
    def has_ended(self) -> bool:
        thread = self._thread()
        return thread is None or not thread.is_alive()


class _OtherThread:
    """Steps of a thread that does not lead. ``first_total``: steps of the leading thread before the first."""

    clock: OptimizerClock

    def __init__(self, identity: ThreadIdentity, first_total: int) -> None:
        self.identity = identity
        self.first_total = self._leads = first_total
        self.total = self._alone = 0
        self._since = monotonic()

    def count(self, leads: int) -> None:
        """Count a step. ``leads`` is the number of steps that the leading thread has made."""
        self.total += 1
        self._alone += 1
        if leads != self._leads:
            self._alone, self._since, self._leads = 1, monotonic(), leads

    @property
    def is_alone(self) -> bool:
        """True if the leading thread is inactive."""
        return self._alone >= INACTIVE_AFTER and monotonic() - self._since >= INACTIVE_SECONDS
