"""Noticing optimizer steps in a loop that knows nothing of memlog.

PyTorch calls global hooks around every ``Optimizer.step()``. The first optimizer whose step begins is
the clock: a wrapper begins before the optimizer that it wraps, so nested steps count once, and of several
optimizers that take turns one is counted. Where the clock falls silent another takes over.

A step that a ``GradScaler`` skips calls no hook and micro-batches of an accumulated gradient are no steps:
neither has an event. Nor has a step inside ``torch.compile``: reading memory there would break its graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memlog.imports import ImportWatch

OPTIMIZER_MODULE = "torch.optim.optimizer"
SILENCE = 10
"""So many steps of other optimizers without one of the clock's mean that it has fallen silent."""


class OptimizerClock:
    """Decides which optimizer steps count.

    Args:
        on_step: Called with the optimizer after each step that counts, on the thread that made it. Must
            not raise.

    Attributes:
        on_step: May be another from the next step on.
    """

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.on_step = on_step
        self._clock: weakref.ref[Any] | None = None
        self._armed = False
        self._others = 0

    def begin(self, optimizer: Any) -> None:
        """A step begins."""
        if self._clock is None or self._clock() is None or self._others >= SILENCE:
            self._clock = weakref.ref(optimizer)
            self._others = 0
        if self._clock() is optimizer:
            self._armed = True

    def end(self, optimizer: Any) -> None:
        """A step is over."""
        if self._clock is None or self._clock() is not optimizer:
            self._others += 1
        elif self._armed:
            # A subclass's step that calls its parent's ends twice. It began twice as well, so the hooks
            # can't be paired by counting: a step that raised has begun and never ends.
            self._armed = False
            self._others = 0
            self.on_step(optimizer)


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
            module.register_optimizer_step_pre_hook(
                _unless_compiling(module.torch, self.clock.begin)
            ),
            module.register_optimizer_step_post_hook(
                _unless_compiling(module.torch, self.clock.end)
            ),
        ]


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
