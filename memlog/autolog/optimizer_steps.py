"""Noticing optimizer steps in a loop that knows nothing of memlog.

PyTorch calls global hooks around every ``Optimizer.step()``. The first optimizer whose step begins is
the clock: a wrapper begins before the optimizer that it wraps, so nested steps count once, and of several
optimizers that take turns one is counted. Where the clock falls silent, or another takes its place, that is
the clock from then on.

Optimizers that step within one backward pass, one for each parameter say, are of one iteration, however many
there are.

A step that a ``GradScaler`` skips calls no hook and micro-batches of an accumulated gradient are no steps:
neither has an event. Nor has a step inside ``torch.compile``: reading memory there would break its graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memlog._internal.import_hook import ImportWatch

OPTIMIZER_MODULE = "torch.optim.optimizer"
SILENCE = 10
"""So many steps of other optimizers without one of the clock's mean that it has fallen silent."""
_SETTLED = 2
"""Steps of the clock after which it is known how many steps of others come between them."""
_PARTNERS = 32
"""Optimizers that are known to take turns with the clock, at most."""


class OptimizerClock:
    """Decides which optimizer steps count.

    Of optimizers that take turns the first is the clock. Where one steps that has not stepped since, and the
    clock has been silent for longer than ever before, it is counted at once: it may have taken the clock's
    place for good. Should the clock come back within `SILENCE` steps the two take turns after all, and as
    many of its steps are passed over as were counted meanwhile: the number is the clock's own again.

    Args:
        on_step: Called with the optimizer after each step that counts, on the thread that made it. Must
            not raise.

    Attributes:
        on_step: May be another from the next step on.
    """

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.on_step = on_step
        self._tenure: _Tenure | None = None
        self._before: list[_Tenure] = []
        self._at_work: list[int] = []
        self._armed = False
        self._backward: int | None = None
        self._again = False

    def begin(self, optimizer: Any, backward: int | None = None) -> None:
        """A step begins.

        Args:
            optimizer: Whose.
            backward: The number of the backward pass that it is made in; ``None``: in none.
        """
        nested = bool(self._at_work) and id(optimizer) not in self._at_work
        self._at_work.append(id(optimizer))
        # Not the first that is made in this backward pass.
        self._again = backward is not None and backward == self._backward
        self._backward = backward
        tenure = self._tenure
        if tenure is None or tenure.clock() is None or tenure.others >= SILENCE:
            self._before.clear()
            self._follow(_Tenure(optimizer))
        elif tenure.clock() is not optimizer and not nested and not self._again:
            self._look_at_another(optimizer, tenure)
        if self._tenure is not None and self._tenure.clock() is optimizer:
            self._armed = True

    def end(self, optimizer: Any) -> None:
        """A step is over."""
        if id(optimizer) in self._at_work:  # with those that began within it and raised
            del self._at_work[self._at_work.index(id(optimizer)) :]
        tenure = self._tenure
        if tenure is None:
            return
        if tenure.clock() is not optimizer:
            if self._again:
                tenure.meet(optimizer)
                return
            tenure.other_stepped(optimizer, nested=bool(self._at_work))
        elif self._armed:
            # A subclass's step that calls its parent's ends twice. It began twice as well, so the hooks
            # can't be paired by counting: a step that raised has begun and never ends.
            self._armed = False
            if tenure.clock_stepped():
                self.on_step(optimizer)

    def _look_at_another(self, optimizer: Any, tenure: _Tenure) -> None:
        """Another than the clock steps by itself: it was the clock before, or may be it from now on."""
        meanwhile = [tenure]
        for former in reversed(self._before):
            if sum(between.steps for between in meanwhile) >= SILENCE:
                break
            if former.clock() is optimizer:
                del self._before[-len(meanwhile) :]
                former.returns(meanwhile)
                self._follow(former)
                return
            meanwhile.append(former)
        if tenure.may_be_over(optimizer):
            self._before = [*self._before[1 - SILENCE :], tenure]
            self._follow(_Tenure(optimizer))

    def _follow(self, tenure: _Tenure) -> None:
        self._tenure = tenure
        self._armed = False


class _Tenure:
    """An optimizer as the clock, and what is known of those that step meanwhile.

    Args:
        optimizer: Held weakly.

    Attributes:
        clock: It.
        steps: Of it.
        others: Steps of others since its last.
        apart: Those of them that were not made within a third's.
        partners: Who made those, at any time.
    """

    def __init__(self, optimizer: Any) -> None:
        self.clock = weakref.ref(optimizer)
        self.steps = 0
        self.others = 0
        self.apart = 0
        self._longest = 0
        self.partners: list[weakref.ref[Any]] = []
        self._passed_over = 0

    def clock_stepped(self) -> bool:
        """It has made a step; whether that counts."""
        self.steps += 1
        self._longest = max(self._longest, self.apart)
        self.others = self.apart = 0
        counts = not self._passed_over
        self._passed_over = max(0, self._passed_over - 1)
        return counts

    def other_stepped(self, optimizer: Any, *, nested: bool) -> None:
        """Another has, within a step of a third or by itself."""
        self.others += 1
        if not nested:
            self.apart += 1
            self.meet(optimizer)

    def may_be_over(self, newcomer: Any) -> bool:
        """Whether one that begins a step by itself may have taken its place."""
        known = any(partner() is newcomer for partner in self.partners)
        return not known and self.steps >= _SETTLED and self.apart >= self._longest

    def returns(self, meanwhile: list[_Tenure]) -> None:
        """It steps again, after others had taken its place."""
        for tenure in meanwhile:
            self._passed_over += tenure.steps
            self.apart += tenure.steps + tenure.apart
            self.meet(tenure.clock())
            for partner in tenure.partners:
                self.meet(partner())

    def meet(self, partner: Any) -> None:
        """One takes turns with it."""
        if partner is None or len(self.partners) >= _PARTNERS:
            return
        if not any(one() is partner for one in self.partners):
            self.partners.append(weakref.ref(partner))


class Autolog:
    """Installs an `OptimizerClock` in torch, now or when torch is imported.

    Args:
        on_step: Called with the optimizer after each step that counts.

    Attributes:
        clock: Decides which steps those are.
    """

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.clock = OptimizerClock(on_step)
        self._handles: list[Any] = []
        self._backward: Callable[[], int] | None = None
        self._watch: ImportWatch | None = None
        module = sys.modules.get(OPTIMIZER_MODULE)
        if module is not None and hasattr(module, "register_optimizer_step_post_hook"):
            self._install(module)
        else:
            self._watch = ImportWatch(OPTIMIZER_MODULE, callback=self._install)

    def remove(self) -> None:
        """Takes everything out again. Calling it again is harmless."""
        if self._watch is not None:
            self._watch.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, module: ModuleType) -> None:
        self._handles = [
            module.register_optimizer_step_pre_hook(_unless_compiling(module.torch, self._begin)),
            module.register_optimizer_step_post_hook(
                _unless_compiling(module.torch, self.clock.end)
            ),
        ]
        self._backward = getattr(getattr(module.torch, "_C", None), "_current_graph_task_id", None)

    def _begin(self, optimizer: Any) -> None:
        number = -1 if self._backward is None else self._backward()
        self.clock.begin(optimizer, number if number >= 0 else None)


def _unless_compiling(torch: Any, notice: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
    """A hook for torch that is nothing at all in a compiled graph, and so breaks none.

    Args:
        torch: The module, which may still be in the middle of its import.
        notice: What the hook does elsewhere.
    """

    def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            notice(optimizer)

    return hook


_waiting: Autolog | None = None


def wait_for_a_session(autolog: Autolog) -> None:
    """Keeps one that is in torch before there is a session: the next `listen` takes it over."""
    global _waiting  # noqa: PLW0603 - the one place that holds it
    _waiting = autolog


def listen(on_step: Callable[[Any], None]) -> Autolog:
    """An `Autolog` for a session: the one that waits for it, or a new one.

    A session that begins with an optimizer's step is begun by torch's own hook, and hooks can't be added
    while torch goes through them.
    """
    global _waiting
    autolog, _waiting = _waiting, None
    if autolog is None:
        return Autolog(on_step)
    autolog.clock.on_step = on_step
    return autolog
