"""Detection of optimizer steps in a loop that does not call memlog, also if several threads train.

PyTorch calls global hooks around every ``Optimizer.step()``. The first optimizer whose step begins is the
clock: only its steps count. If one optimizer wraps another, the outer step begins first. So the two nested
steps count once.

Some scripts have one optimizer for each parameter, and these optimizers step within the backward pass. All
steps within one backward pass belong to one iteration.

A step that a ``GradScaler`` skips calls no hook, so it has no event. A micro-batch of an accumulated gradient
has no event, because it has no optimizer step. A step inside ``torch.compile`` has no event, because reading
memory there would break the graph.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from types import ModuleType
from typing import Any

from memlog._internal.import_hook import ImportWatch, when_imported
from memlog.autolog.run_detector import TRAINER, load_package
from memlog.torchside.loaded import backward_task_of

OPTIMIZER_MODULE = "torch.optim.optimizer"
INACTIVE_AFTER = 10
"""If other optimizers have made this many steps since the last step of the clock (`OptimizerClock`), the
clock is inactive. The next optimizer that makes a step becomes the clock."""
_SETTLED = 2
"""Steps that the clock (`OptimizerClock`) must have made before a new optimizer can replace it. Before that,
memlog doesn't know how many steps other optimizers make between two steps of the clock. A clock that is
deleted, or inactive (`INACTIVE_AFTER`), is replaced at once."""
_PARTNERS = 32
"""Maximum number of optimizers that memlog remembers as alternating with the clock (`OptimizerClock`)."""


class OptimizerClock:
    """Filter that decides which optimizer steps count.

    Only the steps of one optimizer count. This optimizer is the clock. If optimizers alternate, the first is
    the clock.

    The script may replace the clock by a new optimizer. To notice this, the filter counts the steps of other
    optimizers since the clock's last step. If this number is larger than ever before, and the latest step is
    a step of a new optimizer, the new optimizer becomes the clock. The latest step then counts.

    If the old clock steps again before the new clock has made `INACTIVE_AFTER` steps, the two optimizers
    alternate. The old clock becomes the clock again. If the new clock has made N steps, the next N steps of
    the old clock do not count.

    `begin` and `end` are hooks of torch. While torch compiles, they do nothing.

    Args:
        on_step: Function called with the optimizer after each step that counts, on the thread that made the
            step. It must not raise. The attribute of this name can be replaced at any time.

    Attributes:
        torch: The module, if the hooks are installed.
        backward: Function that returns the number of the backward pass in progress; -1: none.
        threads: Other threads that step optimizers; ``None``: this clock serves one thread.
        thread: Thread that stepped the clock's optimizer first; ``None``: none has stepped it.
    """

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.on_step = on_step
        self.torch: Any = None
        self.backward: Callable[[], int] = lambda: -1
        self.threads: TrainingThreads | None = None
        self.thread: ThreadIdentity | None = None
        self._earlier = 0
        self._period: _ClockPeriod | None = None
        self._before: list[_ClockPeriod] = []
        self._running: list[int] = []
        self._armed = False
        self._last_backward = -1
        self._same_backward = False

    def begin(self, optimizer: Any, _args: object = None, _kwargs: object = None) -> None:
        """Handle the beginning of a step of ``optimizer``."""
        torch = self.torch  # its import may not be complete
        if torch is not None and torch.compiler.is_dynamo_compiling():
            return
        period = self._period
        is_clock = period is not None and period.clock() is optimizer
        if not is_clock and self.threads and (other := self.threads.other_clock()) is not None:
            other.begin(optimizer)
            return
        backward, running, number = self.backward(), self._running, id(optimizer)
        nested = not is_clock and bool(running) and number not in running
        running.append(number)
        self._same_backward = 0 <= backward == self._last_backward
        self._last_backward = backward
        if is_clock and period is not None and period.others < INACTIVE_AFTER:
            self._armed = True
            return
        if period is None or period.clock() is None or period.others >= INACTIVE_AFTER:
            self._before.clear()
            self._set_clock(_ClockPeriod(optimizer))
        elif period.clock() is not optimizer and not nested and not self._same_backward:
            self._handle_other(optimizer, period)
        if self._period is not None and self._period.clock() is optimizer:
            self._armed = True

    def end(self, optimizer: Any, _args: object = None, _kwargs: object = None) -> None:
        """Handle the end of a step of ``optimizer``."""
        torch = self.torch
        if torch is not None and torch.compiler.is_dynamo_compiling():
            return
        period, running = self._period, self._running
        is_clock = period is not None and period.clock() is optimizer
        if not is_clock and self.threads and (other := self.threads.other_clock()) is not None:
            other.end(optimizer)
            return
        number = id(optimizer)
        if number in running:
            # Nested steps that raised are removed too, because they have no end.
            del running[running.index(number) :]
        if period is None:
            return
        if not is_clock:
            if self._same_backward:
                period.add_partner(optimizer)
                return
            period.other_stepped(optimizer, nested=bool(running))
        elif self._armed:
            # A subclass's step that calls its parent's step begins and ends twice. Counting can't
            # pair the hooks: if a step raises an error, its begin hook runs, but its end hook does not.
            self._armed = False
            period.steps += 1
            if period.others or period.separate:
                period.end_round()
            if period.to_skip:
                period.to_skip -= 1
            else:
                self.on_step(optimizer)

    @property
    def total(self) -> int:
        """Number of the clock's steps."""
        return self._earlier + (0 if self._period is None else self._period.steps)

    @total.setter
    def total(self, total: int) -> None:
        self._earlier = total - (0 if self._period is None else self._period.steps)

    @property
    def optimizers(self) -> list[Any]:
        """The clock's optimizer and those that alternate with it."""
        if self._period is None:
            return []
        found = (each() for each in (self._period.clock, *self._period.partners))
        return [each for each in found if each is not None]

    @property
    def has_ended(self) -> bool:
        """True if the clock's optimizer is deleted, or the thread that stepped it has ended."""
        is_deleted = self._period is None or self._period.clock() is None
        return is_deleted or (self.thread is not None and self.thread.has_ended)

    def exchange(self, other: OptimizerClock) -> None:
        """Exchange what is known of optimizers with another clock."""
        for name in (
            "_period",
            "_before",
            "_running",
            "_armed",
            "_last_backward",
            "_same_backward",
        ):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, its)
            setattr(other, name, mine)

    def _handle_other(self, optimizer: Any, period: _ClockPeriod) -> None:
        """Make ``optimizer`` the clock if it was the clock recently, or if it seems to replace the clock."""
        meanwhile = [period]
        for former in reversed(self._before):
            if sum(between.steps for between in meanwhile) >= INACTIVE_AFTER:
                break
            if former.clock() is optimizer:
                del self._before[-len(meanwhile) :]
                former.resume(meanwhile)
                self._set_clock(former)
                return
            meanwhile.append(former)
        if period.may_be_over(optimizer):
            self._before = [*self._before[1 - INACTIVE_AFTER :], period]
            self._set_clock(_ClockPeriod(optimizer))

    def _set_clock(self, period: _ClockPeriod) -> None:
        self.thread, total = ThreadIdentity(), self.total
        self._period, self._armed = period, False
        self.total = total


class _ClockPeriod:
    """Period in which one optimizer is the clock (`OptimizerClock`).

    ``others`` is the number of other optimizers' steps since the clock's last step. ``separate`` leaves out
    the steps that are inside another optimizer's step. ``partners`` are the optimizers that alternate with
    the clock. The next ``to_skip`` steps of the clock do not count.
    """

    def __init__(self, optimizer: Any) -> None:
        self.clock = weakref.ref(optimizer)
        self.steps = 0
        self.others = 0
        self.separate = 0
        self._longest = 0
        self.partners: list[weakref.ref[Any]] = []
        self.to_skip = 0

    def end_round(self) -> None:
        """Begin to count the steps of other optimizers again, because the clock has stepped."""
        self._longest = max(self._longest, self.separate)
        self.others = self.separate = 0

    def other_stepped(self, optimizer: Any, *, nested: bool) -> None:
        """Record a step of an optimizer that is not the clock.

        ``nested`` is true if the step is inside another optimizer's step.
        """
        self.others += 1
        if not nested:
            self.separate += 1
            self.add_partner(optimizer)

    def may_be_over(self, newcomer: Any) -> bool:
        """Return True if ``newcomer`` may have replaced this period's optimizer."""
        known = any(partner() is newcomer for partner in self.partners)
        return not known and self.steps >= _SETTLED and self.separate >= self._longest

    def resume(self, meanwhile: list[_ClockPeriod]) -> None:
        """Continue this period after the periods ``meanwhile``, in which other optimizers were the clock.

        If the other clocks made N steps in these periods, the next N steps of this optimizer do not count.
        """
        for period in meanwhile:
            self.to_skip += period.steps
            self.separate += period.steps + period.separate
            self.add_partner(period.clock())
            for partner in period.partners:
                self.add_partner(partner())

    def add_partner(self, partner: Any) -> None:
        if partner is None or len(self.partners) >= _PARTNERS:
            return
        if not any(one() is partner for one in self.partners):
            self.partners.append(weakref.ref(partner))


class Autolog:
    """Hooks of torch that pass the optimizers' steps to an `OptimizerClock`.

    The hooks are added when the script imports torch's optimizers. If these are imported already, the hooks
    are added at once. When the script imports Transformers' ``Trainer``, an `Autolog` imports
    ``memlog_transformers`` (`memlog.autolog.run_detector`).
    """

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.clock = OptimizerClock(on_step)
        self.threads = self.clock.threads = TrainingThreads(self.clock, self._clock_of_thread)
        self._handles: list[Any] = []
        self._watches: list[ImportWatch] = []
        self._when_imported(TRAINER, load_package)
        self._when_imported(OPTIMIZER_MODULE, self._install)

    def remove(self) -> None:
        """Remove all hooks. Calling it again has no effect."""
        for each in (*self._watches, *self._handles):
            each.remove()
        self._handles.clear()

    def _clock_of_thread(self, on_step: Callable[[Any], None]) -> OptimizerClock:
        clock = OptimizerClock(on_step)
        clock.torch, clock.backward = self.clock.torch, self.clock.backward
        return clock

    def _when_imported(self, name: str, callback: Callable[[ModuleType], object]) -> None:
        watch = when_imported(name, callback)
        if watch is not None:
            self._watches.append(watch)

    def _install(self, module: ModuleType) -> None:
        if not hasattr(module, "register_optimizer_step_post_hook"):
            return  # another thread is still importing torch: this run's steps are not detected
        clock = self.clock
        clock.torch = module.torch
        clock.backward = backward_task_of(module.torch) or clock.backward
        self._handles = [
            module.register_optimizer_step_pre_hook(clock.begin),
            module.register_optimizer_step_post_hook(clock.end),
        ]


_waiting: Autolog | None = None


def wait_for_a_session(autolog: Autolog) -> None:
    """Keep an `Autolog` that was installed before a session begins. The next `listen` returns it."""
    global _waiting  # noqa: PLW0603 - the only writer besides `listen`
    _waiting = autolog


def listen(on_step: Callable[[Any], None]) -> Autolog:
    """Return the `Autolog` that `wait_for_a_session` has kept. If no `Autolog` was kept, return a new one.

    A session can begin within an optimizer's step. Then torch is running hooks, and none can be
    added. The kept `Autolog` already has hooks.
    """
    global _waiting
    autolog, _waiting = _waiting, None
    if autolog is None:
        return Autolog(on_step)
    autolog.clock.on_step = on_step
    return autolog


INACTIVE_SECONDS = 1.0
"""The leading thread is inactive if, since its last step, another thread has made `INACTIVE_AFTER` steps, and
this time has passed. Of threads that share a processor, one may make many steps in the other's pause."""


_AHEAD = 4
"""If another thread is ahead of the leading one by more steps than this and than a quarter, for as long as
`INACTIVE_SECONDS`, it is the faster one. Threads of one speed do not take turns in leading."""


class TrainingThreads:
    """Threads that step optimizers. One leads: its steps are the session's steps.

    Each thread has a clock of its own, so optimizers of different threads do not mix. Another thread takes
    the lead if the leading thread has ended, if its optimizer is deleted, or if it is inactive or slower. The
    main thread takes the lead in any case, and keeps it: what a helper thread trains beside it is not the
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
        is_main = leading.thread is not None and leading.thread.is_main
        pauses = is_parallel and is_main
        is_slower = other.is_faster and not is_main
        is_left = leading.has_ended or is_slower or (other.is_alone and not pauses)
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
        self._ahead_since = math.inf

    def count(self, leads: int) -> None:
        """Count a step. ``leads`` is the number of steps that the leading thread has made."""
        self.total += 1
        self._alone += 1
        if leads != self._leads:
            self._alone, self._since, self._leads = 1, monotonic(), leads
        if self.total - leads <= max(_AHEAD, leads // 4):
            self._ahead_since = math.inf
        elif self._ahead_since == math.inf:
            self._ahead_since = monotonic()

    @property
    def is_faster(self) -> bool:
        """True if the leading thread is slower."""
        return monotonic() - self._ahead_since >= INACTIVE_SECONDS

    @property
    def is_alone(self) -> bool:
        """True if the leading thread is inactive."""
        return self._alone >= INACTIVE_AFTER and monotonic() - self._since >= INACTIVE_SECONDS
