"""Hearing of modules and optimizers at work, through torch's global hooks.

Nothing is put on a module or a parameter: a hook there would be pickled with the model, and full backward
hooks break models with in-place activations. In a compiled graph the hooks are nothing at all.

torch walks through its table of optimizer hooks while it calls them, and raises into the training loop where
that table changes meanwhile. So whoever opens and closes windows in such hooks holds the optimizer's
(`hold_optimizer_hooks`) for as long as it may, and windows only come and go as their listeners.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memlog import forks
from memlog.health import Health
from memlog.tracer.scopes import LISTENERS, Scope
from memlog.tracer.silence import Silence


class Listener(Protocol):
    """What is told."""

    def module_begins(self, module: Any, args: Any) -> None:
        """A module's ``forward`` begins."""

    def module_ends(self, module: Any, output: Any) -> None:
        """It has ended; ``output`` is ``None`` where an exception ended it."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """It has ended."""


class Hooks:
    """The hooks of one engine; errors in the listener are counted and reach nobody.

    Args:
        listener: Who is told.
        health: Where errors are counted.
    """

    def __init__(self, listener: Listener, health: Health) -> None:
        self._listener = listener
        self._health = health
        self._handles: list[Any] = []
        self._silence: Silence | None = None
        self._optimizer: _OptimizerListener | None = None

    def install(self) -> None:
        """Puts the hooks in: all of them or none."""
        self._silence = Silence()
        begins, ends = self._module_hooks()
        try:
            self._handles.append(register_module_forward_pre_hook(begins))
            self._handles.append(register_module_forward_hook(ends, always_call=True))
            self._handles.append(hold_optimizer_hooks())
            self._optimizer = _OptimizerListener(self._listener, self._health)
            _watch.listeners = (*_watch.listeners, self._optimizer)
            LISTENERS.add(self)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes them out again. Calling it again is harmless."""
        LISTENERS.remove(self)
        gone, self._optimizer = self._optimizer, None
        if gone is not None:
            gone.close()
            _watch.listeners = tuple(one for one in _watch.listeners if one is not gone)
        while self._handles:
            self._handles.pop().remove()
        if self._silence is not None:
            self._silence.end()

    def scope_begins(self, scope: Scope) -> None:
        """A scope begins, which is to the listener as a module."""
        with self._health.contained("noticing that a scope begins"):
            if not torch.compiler.is_compiling():
                self._listener.module_begins(scope, ())

    def scope_ends(self, scope: Scope) -> None:
        """It has ended."""
        with self._health.contained("noticing that a scope ends"):
            if not torch.compiler.is_compiling():
                self._listener.module_ends(scope, None)

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        listener, health, compiling = self._listener, self._health, torch.compiler.is_compiling

        def begins(module: Any, args: Any) -> None:
            if compiling():
                return
            try:
                listener.module_begins(module, args)
            except Exception as error:  # noqa: BLE001 - training goes on
                health.fault("noticing that a module begins", error)

        def ends(module: Any, _args: Any, output: Any) -> None:
            if compiling():
                return
            try:
                listener.module_ends(module, output)
            except Exception as error:  # noqa: BLE001 - training goes on
                health.fault("noticing that a module ends", error)

        return begins, ends


class OptimizerHooksHeld:
    """The optimizer hooks stay in torch until `remove` has been called on everybody's."""

    def __init__(self) -> None:
        self._held = True

    def remove(self) -> None:
        """Lets go. Calling it again is harmless."""
        if self._held:
            self._held = False
            _watch.release()


def hold_optimizer_hooks() -> OptimizerHooksHeld:
    """Puts the optimizer hooks into torch, where nobody holds them yet.

    Neither this nor letting go of the last may happen within an optimizer's step, unless somebody else holds
    them too.
    """
    _watch.acquire()
    return OptimizerHooksHeld()


class _OptimizerListener:
    """Passes on to one engine what optimizers do."""

    def __init__(self, listener: Listener, health: Health) -> None:
        self._listener = listener
        self._health = health
        self._at_work: list[Any] = []

    def close(self) -> None:
        """Ends what has begun: a session's own hook closes a window before the last step's end is heard."""
        for optimizer in self._at_work[::-1]:
            self.ends(optimizer)

    def begins(self, optimizer: Any) -> None:
        self._at_work.append(optimizer)
        try:
            self._listener.optimizer_begins(optimizer)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._health.fault("noticing an optimizer's step", error)

    def ends(self, optimizer: Any) -> None:
        self._at_work = [other for other in self._at_work if other is not optimizer]
        try:
            self._listener.optimizer_ends(optimizer)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._health.fault("noticing an optimizer's step", error)


class _OptimizerWatch:
    """The process's one pair of optimizer hooks, and who listens to it now."""

    def __init__(self) -> None:
        self.listeners: tuple[_OptimizerListener, ...] = ()
        self._lock = threading.Lock()
        self._holders = 0
        self._handles: list[Any] = []

    def acquire(self) -> None:
        with self._lock:
            if not self._holders:
                self._handles = [
                    register_optimizer_step_pre_hook(self._begins),
                    register_optimizer_step_post_hook(self._ends),
                ]
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                while self._handles:
                    self._handles.pop().remove()

    def _begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            for listener in self.listeners:
                listener.begins(optimizer)

    def _ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            for listener in self.listeners:
                listener.ends(optimizer)


_watch = _OptimizerWatch()
forks.renew(_watch, "_lock", threading.Lock)
