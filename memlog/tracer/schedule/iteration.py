"""Which optimizers take part in a training iteration, so that a window covers all of one.

The clock's steps (`memlog.autolog`) are what time is counted in. An optimizer steps once in so many of them:
a discriminator's steps being the clock, the generator's come every fifth, say. A window covers an iteration
where it holds that many steps of the clock, and a step of everybody who takes part.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from memlog.tracer.schedule.top_modules import trained_elsewhere

LONGEST = 16
"""Steps of the clock that a window covers at most. An optimizer that steps more rarely has none in most of
them."""
_MOST = 4096
"""Optimizers that are followed, of which there may be one for each parameter; those that have not stepped for
longest are forgotten."""

OptimizerRefs: TypeAlias = tuple[weakref.ref[Any], ...]


class OptimizerSchedule:
    """Hears of every optimizer's steps, in and between windows.

    Args:
        begins: Called with an optimizer before it is taken note of that it steps.
        ends: Called with an optimizer whose step is over, where no other's is at work.
    """

    def __init__(self, begins: Callable[[Any], object], ends: Callable[[Any], object]) -> None:
        self._begins = begins
        self._ends = ends
        self._parts: dict[int, _OptimizerSteps] = {}
        self._stepping: set[int] = set()
        self._now = 0
        self._began = 0

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        self._begins(optimizer)
        self._stepping.add(id(optimizer))
        part = self._parts.pop(id(optimizer), None)
        if part is None or part.optimizer() is not optimizer:
            part = _OptimizerSteps(optimizer)
        elif self._now > part.last:
            part.interval = self._now - part.last
        part.last = self._now
        part.thread = threading.current_thread()
        self._parts[id(optimizer)] = part  # the newest stands last
        if len(self._parts) > _MOST:
            del self._parts[next(iter(self._parts))]
        if not part.in_window:
            part.in_window = True
            part.had_state = _has_state(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        """It has ended."""
        self._stepping.discard(id(optimizer))
        if not self._stepping:
            self._ends(optimizer)

    def clock_stepped(self) -> None:
        """The clock has made a step."""
        self._now += 1

    def begin(self) -> None:
        """A window begins, maybe within an optimizer's step (LBFGS calls the model in its own)."""
        self._began = self._now
        for identity, part in list(self._parts.items()):
            part.in_window = identity in self._stepping

    @property
    def steps(self) -> int:
        """Steps of the clock since the window began."""
        return self._now - self._began

    @property
    def has_interval(self) -> bool:
        """Whether any optimizer has stepped twice, so that there is a rhythm."""
        return any(part.interval is not None for part in list(self._parts.values()))

    @property
    def iteration_done(self) -> bool:
        """Whether the window covers an iteration, as far as one is known by now."""
        # Those that have not stepped in it stand first, so of very many one is looked at.
        if any(not part.in_window for part in self._active()):
            return False
        return self.steps >= max((part.interval or 1 for part in self._active()), default=1)

    @property
    def too_rare(self) -> bool:
        """Whether it never will, within `LONGEST` steps of the clock."""
        rare = any((part.interval or 1) > LONGEST for part in self._active())
        return rare or self.steps >= LONGEST

    @property
    def state_is_new(self) -> bool:
        """Whether an optimizer made its state within the window."""
        return any(
            not part.had_state and _has_state(optimizer) for part, optimizer in self._stepped()
        )

    def optimizers(self) -> list[Any]:
        """Those that no other thread steps; their state takes memory also where they step no more."""
        parts = list(self._parts.values())
        found = [part.optimizer() for part in parts if not trained_elsewhere(part.thread)]
        return [optimizer for optimizer in found if optimizer is not None]

    def members(self) -> OptimizerRefs:
        """Those that stepped in the window."""
        return tuple(part.optimizer for part, _ in self._stepped())

    def has_joined(self, members: OptimizerRefs) -> bool:
        """Whether one takes part now that did not, beside one that did."""
        there = {id(optimizer) for optimizer in (one() for one in members) if optimizer is not None}
        found = [id(part.optimizer()) in there for part in self._active()]
        return any(found) and not all(found)

    def steps_all_of(self, models: Iterable[Any]) -> bool:
        """Whether those that stepped in the window have all of the models' parameters that are trained."""
        theirs = {
            id(parameter)
            for _, optimizer in self._stepped()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return all(
            id(parameter) in theirs
            for model in models
            for parameter in model.parameters()
            if parameter.requires_grad
        )

    def _active(self) -> Iterator[_OptimizerSteps]:
        for part in list(self._parts.values()):
            if part.optimizer() is not None and self._now - part.last <= part.inactive_after:
                yield part

    def _stepped(self) -> list[tuple[_OptimizerSteps, Any]]:
        found = [(part, part.optimizer()) for part in list(self._parts.values()) if part.in_window]
        return [(part, optimizer) for part, optimizer in found if optimizer is not None]


class _OptimizerSteps:
    """An optimizer.

    Args:
        optimizer: Held weakly.

    Attributes:
        last: The clock's steps before it began its last.
        interval: Steps of the clock between its last two; ``None``: it has not stepped twice.
        in_window: Whether it stepped in the window.
        had_state: Whether it had state then.
        thread: On which.
    """

    __slots__ = ("had_state", "in_window", "interval", "last", "optimizer", "thread")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.last = 0
        self.interval: int | None = None
        self.in_window = self.had_state = False
        self.thread: threading.Thread | None = None

    @property
    def inactive_after(self) -> int:
        """Steps of the clock without one of its own after which it has no part any more."""
        return LONGEST if self.interval is None else 2 * self.interval + 1


def _has_state(optimizer: Any) -> bool:
    return any(isinstance(kept, dict) and kept for kept in optimizer.state.values())
