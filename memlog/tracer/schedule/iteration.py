"""Optimizers that take part in a training iteration. A window should cover a whole iteration.

The unit of time is a clock step: a step of the optimizer whose steps memlog counts (`memlog.autolog`). The
interval of an optimizer is the number of clock steps from one of its steps to the next. For example, an
optimizer that steps at every fifth clock step has interval 5. A window covers an iteration if two conditions
hold: the window has as many clock steps as the longest interval, and every optimizer that takes part has
stepped in the window.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from memlog.tracer.schedule.top_modules import trained_elsewhere

LONGEST = 16
"""Maximum length of a window, in steps of the optimizer whose steps memlog counts. An optimizer that steps
more rarely does not step in most windows."""
_MOST = 4096
"""Maximum number of optimizers to track. A program may have one optimizer for each parameter. Beyond the
maximum, the optimizer whose last step is oldest is dropped."""

OptimizerRefs: TypeAlias = tuple[weakref.ref[Any], ...]


class OptimizerSchedule:
    """Record of how often every optimizer steps.

    Args:
        begins: Function to call with an optimizer whose step begins.
        ends: Function to call with an optimizer whose step has ended, if no other optimizer is stepping.

    Attributes:
        clock_steps: Number of steps so far of the optimizer whose steps memlog counts. The session's tracer
            increases the number.
    """

    def __init__(self, begins: Callable[[Any], object], ends: Callable[[Any], object]) -> None:
        self._begins = begins
        self._ends = ends
        self._parts: dict[int, _OptimizerSteps] = {}
        self._stepping: set[int] = set()
        self.clock_steps = 0

    def optimizer_begins(self, optimizer: Any) -> None:
        self._begins(optimizer)
        self._stepping.add(id(optimizer))
        part = self._parts.pop(id(optimizer), None)
        if part is None or part.optimizer() is not optimizer:
            part = _OptimizerSteps(optimizer)
        elif self.clock_steps > part.last:
            part.interval = self.clock_steps - part.last
        part.last = self.clock_steps
        part.thread = threading.current_thread()
        self._parts[id(optimizer)] = part  # last, as the newest
        if len(self._parts) > _MOST:
            del self._parts[next(iter(self._parts))]
        if not part.in_window:
            part.in_window = True
            part.had_state = _has_state(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        self._stepping.discard(id(optimizer))
        if not self._stepping:
            self._ends(optimizer)

    @property
    def has_interval(self) -> bool:
        """True if the interval of an optimizer is known, because this optimizer has stepped twice."""
        return any(part.interval is not None for part in list(self._parts.values()))

    def optimizers(self) -> list[Any]:
        """Return all optimizers except those of other threads.

        Inactive optimizers are included, because their state takes memory.
        """
        return [optimizer for _, optimizer in self.of_this_thread()]

    def has_joined(self, members: OptimizerRefs) -> bool:
        """Return whether some of ``members`` and some other optimizer take part in the current iteration."""
        there = {id(optimizer) for optimizer in (one() for one in members) if optimizer is not None}
        found = [id(part.optimizer()) in there for part in self.active()]
        return any(found) and not all(found)

    def begin_window(self) -> None:
        """Start a window. An optimizer step that is running counts as a step in the window.

        LBFGS, for example, calls the model within its step.
        """
        for identity, part in list(self._parts.items()):
            part.in_window = identity in self._stepping

    def active(self) -> Iterator[_OptimizerSteps]:
        """Yield the optimizers that take part in the current iteration."""
        for part, _ in self.of_this_thread():
            if self.clock_steps - part.last <= part.inactive_after:
                yield part

    def of_this_thread(self) -> Iterator[tuple[_OptimizerSteps, Any]]:
        """Yield the existing optimizers except those of other threads.

        An iteration belongs to one thread.
        """
        for part in list(self._parts.values()):
            optimizer = part.optimizer()
            if optimizer is not None and not trained_elsewhere(part.thread):
                yield part, optimizer


class TracedIteration:
    """Optimizers' steps in a window. They tell which part of a training iteration the window covers."""

    def __init__(self, schedule: OptimizerSchedule) -> None:
        self._schedule = schedule
        self._began = 0

    def begin(self) -> None:
        """Begin to count steps. Call this when a window opens."""
        self._began = self._schedule.clock_steps
        self._schedule.begin_window()

    @property
    def steps(self) -> int:
        """Increase of `OptimizerSchedule.clock_steps` since the window began."""
        return self._schedule.clock_steps - self._began

    @property
    def is_done(self) -> bool:
        """True if the window covers an iteration. An unknown interval of an optimizer counts as 1."""
        # `active` first yields the optimizer whose last step is the oldest. So `any` usually ends at once,
        # also if there are very many optimizers.
        if any(not part.in_window for part in self._schedule.active()):
            return False
        return self.steps >= max(
            (part.interval or 1 for part in self._schedule.active()), default=1
        )

    @property
    def too_rare(self) -> bool:
        """True if an optimizer's interval exceeds `LONGEST`, or if `steps` has reached `LONGEST`."""
        rare = any((part.interval or 1) > LONGEST for part in self._schedule.active())
        return rare or self.steps >= LONGEST

    @property
    def state_is_new(self) -> bool:
        """True if an optimizer created its state within the window."""
        return any(
            not part.had_state and _has_state(optimizer) for part, optimizer in self._stepped()
        )

    def members(self) -> OptimizerRefs:
        """Return the optimizers that stepped in the window."""
        return tuple(part.optimizer for part, _ in self._stepped())

    def steps_all_of(self, models: Iterable[Any]) -> bool:
        """Return True if the optimizers that stepped have all trainable parameters of ``models``."""
        stepped = {
            id(parameter)
            for _, optimizer in self._stepped()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return all(
            id(parameter) in stepped
            for model in models
            for parameter in model.parameters()
            if parameter.requires_grad
        )

    def _stepped(self) -> list[tuple[_OptimizerSteps, Any]]:
        return [
            (part, optimizer)
            for part, optimizer in self._schedule.of_this_thread()
            if part.in_window
        ]


class _OptimizerSteps:
    """Steps of one optimizer, which is held weakly.

    Attributes:
        last: Value of `OptimizerSchedule.clock_steps` when the optimizer's last step began.
        interval: Increase of `OptimizerSchedule.clock_steps` between the optimizer's last two steps; ``None``
            before the optimizer's second step.
        in_window: True if the optimizer stepped in the window.
        had_state: True if the optimizer had state before its first step in the window.
        thread: Thread of the last step.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.last = 0
        self.interval: int | None = None
        self.in_window = self.had_state = False
        self.thread: threading.Thread | None = None

    @property
    def inactive_after(self) -> int:
        """Number of clock steps. After a longer time without a step, the optimizer is inactive."""
        return LONGEST if self.interval is None else 2 * self.interval + 1


def _has_state(optimizer: Any) -> bool:
    return any(isinstance(kept, dict) and kept for kept in optimizer.state.values())
