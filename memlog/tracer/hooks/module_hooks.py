"""Hearing of modules and optimizers at work, through torch's global hooks.

Nothing is put on a module or a parameter: a hook there would be pickled with the model, and full backward
hooks break models with in-place activations. In a compiled graph the hooks are nothing at all.

torch walks through its table of optimizer hooks while it calls them, and raises into the training loop where
that table changes meanwhile. So whoever opens and closes windows in such hooks listens to optimizers itself
(`OptimizerSubscription`) for as long as it may, and windows only come and go as further listeners.
"""

from __future__ import annotations

import threading
import weakref
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

from memlog._internal import fork
from memlog._internal.diagnostics import Diagnostics
from memlog.tracer.attribution.user_scopes import LISTENERS, Scope
from memlog.tracer.hooks.warning_filter import CompileWarningFilter


class OptimizerListener(Protocol):
    """What is told of optimizers."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """It has ended."""


class Listener(OptimizerListener, Protocol):
    """What is told of modules, too."""

    def module_begins(self, module: Any, args: Any) -> None:
        """A module's ``forward`` begins."""

    def module_ends(self, module: Any, output: Any) -> None:
        """It has ended; ``output`` is ``None`` where an exception ended it."""


class Hooks:
    """The hooks of one engine; errors in the listener are counted and reach nobody.

    Args:
        listener: Who is told.
        diagnostics: Where errors are counted.
    """

    def __init__(self, listener: Listener, diagnostics: Diagnostics) -> None:
        self._listener = listener
        self._diagnostics = diagnostics
        self._handles: list[Any] = []
        self._warning_filter: CompileWarningFilter | None = None
        self._optimizers: OptimizerSubscription | None = None

    def install(self) -> None:
        """Puts the hooks in: all of them or none."""
        self._warning_filter = CompileWarningFilter()
        begins, ends = self._module_hooks()
        try:
            self._handles.append(register_module_forward_pre_hook(begins))
            self._handles.append(register_module_forward_hook(ends, always_call=True))
            self._optimizers = OptimizerSubscription(self._listener, self._diagnostics)
            LISTENERS.add(self)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes them out again. Calling it again is harmless."""
        LISTENERS.remove(self)
        optimizers, self._optimizers = self._optimizers, None
        if optimizers is not None:
            optimizers.remove()
        while self._handles:
            self._handles.pop().remove()
        if self._warning_filter is not None:
            self._warning_filter.end()

    def scope_begins(self, scope: Scope) -> None:
        """A scope begins, which is to the listener as a module."""
        with self._diagnostics.contained("noticing that a scope begins"):
            if not torch.compiler.is_compiling():
                self._listener.module_begins(scope, ())

    def scope_ends(self, scope: Scope) -> None:
        """It has ended."""
        with self._diagnostics.contained("noticing that a scope ends"):
            if not torch.compiler.is_compiling():
                self._listener.module_ends(scope, None)

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        listener, diagnostics, compiling = (
            self._listener,
            self._diagnostics,
            torch.compiler.is_compiling,
        )

        def begins(module: Any, args: Any) -> None:
            if compiling():
                return
            try:
                listener.module_begins(module, args)
            except Exception as error:  # noqa: BLE001 - training goes on
                diagnostics.fault("noticing that a module begins", error)

        def ends(module: Any, _args: Any, output: Any) -> None:
            if compiling():
                return
            try:
                listener.module_ends(module, output)
            except Exception as error:  # noqa: BLE001 - training goes on
                diagnostics.fault("noticing that a module ends", error)

        return begins, ends


class OptimizerSubscription:
    """Passes on to a listener what optimizers do, until `remove`; the hooks stay in torch as long.

    Neither the first of these nor removing the last may happen within an optimizer's step.

    Args:
        listener: Who is told.
        diagnostics: Where its errors are counted.
    """

    def __init__(self, listener: OptimizerListener, diagnostics: Diagnostics) -> None:
        self._listener = listener
        self._diagnostics = diagnostics
        self._stepping: list[weakref.ref[Any]] = []
        self._removed = False
        _watch.acquire(self)

    def remove(self) -> None:
        """Ends what has begun, and tells no more. Calling it again is harmless.

        A session's own hook closes a window before the last step's end is heard.
        """
        if not self._removed:
            for optimizer in [reference() for reference in self._stepping[::-1]]:
                if optimizer is not None:
                    self.ends(optimizer)
            self._removed = True
            _watch.release(self)

    def begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        if self._removed:
            return
        self._stepping.append(weakref.ref(optimizer))
        try:
            self._listener.optimizer_begins(optimizer)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._diagnostics.fault("noticing an optimizer's step", error)

    def ends(self, optimizer: Any) -> None:
        """It has ended."""
        if self._removed:
            return
        self._stepping = [other for other in self._stepping if other() is not optimizer]
        try:
            self._listener.optimizer_ends(optimizer)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._diagnostics.fault("noticing an optimizer's step", error)


class _OptimizerWatch:
    """The process's one pair of optimizer hooks, and who listens to it now."""

    def __init__(self) -> None:
        self._listeners: tuple[OptimizerSubscription, ...] = ()
        self._lock = threading.Lock()
        self._handles: list[Any] = []

    def acquire(self, listener: OptimizerSubscription) -> None:
        with self._lock:
            if not self._listeners:
                self._handles = [
                    register_optimizer_step_pre_hook(self._begins),
                    register_optimizer_step_post_hook(self._ends),
                ]
            self._listeners = (*self._listeners, listener)

    def release(self, listener: OptimizerSubscription) -> None:
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)
            if not self._listeners:
                while self._handles:
                    self._handles.pop().remove()

    def _begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            for listener in self._listeners:
                listener.begins(optimizer)

    def _ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            for listener in self._listeners:
                listener.ends(optimizer)


_watch = _OptimizerWatch()
fork.renew(_watch, "_lock", threading.Lock)
