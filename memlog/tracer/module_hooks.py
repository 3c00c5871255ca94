"""Hooks that observe modules, optimizers and the backward pass from layer to layer.

memlog puts no hook on a module or parameter. Such a hook would be pickled with the model, and full backward
hooks break models with in-place activations. Global hooks do not run in a compiled graph.

torch iterates over its table of optimizer hooks while it calls them. If the table changes during the
iteration, torch raises an error in the training loop. So code that opens and closes windows in optimizer
hooks keeps its own `OptimizerSubscription` as long as windows may open. Opening a window then only adds a
listener, and does not change torch's table.

When the backward pass reaches a module, a hook runs on the graph node that made the module's output. When the
backward pass leaves the module, a hook runs on the node that made the module's input. Autograd runs a GPU's
backward pass, with the hooks, on autograd's own threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import thread_time
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

from memlog._internal.diagnostics import Diagnostics
from memlog.torchside import internals
from memlog.tracer.function_patch import COMPILE_WARNING_FILTER
from memlog.tracer.owners import MAX_RANGES
from memlog.tracer.shared_hook import SharedHook
from memlog.tracer.tensor_storages import tensors_in
from memlog.tracer.user_scopes import LISTENERS, UserScope


class OptimizerListener(Protocol):
    def optimizer_begins(self, optimizer: Any) -> None: ...

    def optimizer_ends(self, optimizer: Any) -> None: ...


class Listener(OptimizerListener, Protocol):
    def module_begins(self, module: Any, args: Any) -> None: ...

    def module_ends(self, module: Any, output: Any) -> None:
        """Handle the end of a module's ``forward``; ``output`` is ``None`` if an exception ended it."""


class Hooks:
    """Hooks of one engine. The listener's errors are counted and not raised.

    ``took``: Function that gets the seconds that the listener has taken in a hook.
    """

    def __init__(
        self, listener: Listener, diagnostics: Diagnostics, took: Callable[[float], object]
    ) -> None:
        self._listener = listener
        self._took = took
        self._diagnostics = diagnostics
        self._handles: list[Any] = []
        self._optimizers: OptimizerSubscription | None = None

    def install(self) -> None:
        """Install the hooks. If this raises, the caller must call `remove`."""
        COMPILE_WARNING_FILTER.add(self)
        begins, ends = self._module_hooks()
        self._handles.append(register_module_forward_pre_hook(begins))
        # The hook must run even if `forward` raises: the module has ended then, too.
        self._handles.append(register_module_forward_hook(ends, always_call=True))
        self._optimizers = OptimizerSubscription(self, self._diagnostics)
        LISTENERS.add(self)

    def remove(self) -> None:
        """Remove the hooks. A second call is harmless."""
        LISTENERS.remove(self)
        if self._optimizers is not None:
            self._optimizers.remove()
        while self._handles:
            self._handles.pop().remove()
        COMPILE_WARNING_FILTER.remove(self)

    def scope_begins(self, scope: UserScope) -> None:
        """Report the begin of a scope to the listener, as if the scope were a module."""
        with self._diagnostics.contained("noticing that a scope begins"):
            if not torch.compiler.is_compiling():
                self._listener.module_begins(scope, ())

    def scope_ends(self, scope: UserScope) -> None:
        with self._diagnostics.contained("noticing that a scope ends"):
            if not torch.compiler.is_compiling():
                self._listener.module_ends(scope, None)

    def optimizer_begins(self, optimizer: Any) -> None:
        began = thread_time()
        self._listener.optimizer_begins(optimizer)
        self._took(thread_time() - began)

    def optimizer_ends(self, optimizer: Any) -> None:
        began = thread_time()
        self._listener.optimizer_ends(optimizer)
        self._took(thread_time() - began)

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        listener, diagnostics, took = self._listener, self._diagnostics, self._took
        compiling = torch.compiler.is_compiling

        def begins(module: Any, args: Any) -> None:
            if compiling():
                return
            began = thread_time()
            try:
                listener.module_begins(module, args)
                took(thread_time() - began)
            except Exception as error:  # noqa: BLE001 - training goes on
                diagnostics.fault("noticing that a module begins", error)

        def ends(module: Any, _args: Any, output: Any) -> None:
            if compiling():
                return
            began = thread_time()
            try:
                listener.module_ends(module, output)
                took(thread_time() - began)
            except Exception as error:  # noqa: BLE001 - training goes on
                diagnostics.fault("noticing that a module ends", error)

        for hook in (begins, ends):
            internals.skip_compiling(hook)
        return begins, ends


class OptimizerSubscription:
    """Subscription to optimizer steps. `remove` ends the subscription.

    memlog's optimizer hooks stay in torch while the process has a subscription. Do not create the first
    subscription or remove the last one within an optimizer's step. The listener's errors are counted and not
    raised.
    """

    def __init__(self, listener: OptimizerListener, diagnostics: Diagnostics) -> None:
        self._listener = listener
        self._diagnostics = diagnostics
        self._stepping: list[tuple[weakref.ref[Any], int]] = []
        self._removed = False
        _optimizer_hooks.add(self)

    def remove(self) -> None:
        """End the subscription. A second call is harmless.

        Before the subscription ends, report to the listener that the optimizer steps of this thread have
        ended. This thread may be inside a step, because a session's own hook can close a window during a
        step. Steps of other threads are not reported, because the state of their optimizers is not part of
        the window.
        """
        if not self._removed:
            here = threading.get_ident()
            # The innermost step ends first.
            open_here = [reference for reference, thread in self._stepping[::-1] if thread == here]
            for optimizer in [reference() for reference in open_here]:
                if optimizer is not None:
                    self.ends(optimizer)
            self._removed = True
            _optimizer_hooks.remove(self)

    def begins(self, optimizer: Any) -> None:
        if self._removed:
            return
        self._stepping.append((weakref.ref(optimizer), threading.get_ident()))
        with self._diagnostics.contained("noticing an optimizer's step"):
            self._listener.optimizer_begins(optimizer)

    def ends(self, optimizer: Any) -> None:
        if self._removed:
            return
        self._stepping = [other for other in self._stepping if other[0]() is not optimizer]
        with self._diagnostics.contained("noticing an optimizer's step"):
            self._listener.optimizer_ends(optimizer)


class _OptimizerHooks(SharedHook[OptimizerSubscription]):
    def __init__(self) -> None:
        super().__init__()
        self._handles: list[Any] = []

    def _install(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]

    def _uninstall(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            for listener in self.holders:
                listener.begins(optimizer)

    def _ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            for listener in self.holders:
                listener.ends(optimizer)


_optimizer_hooks = _OptimizerHooks()


class BackwardMarks:
    """Hooks on nodes of the autograd graph.

    The hooks are freed with the graph, and do nothing after the window's end.

    Args:
        reached: Function to call with the layer that the backward pass reaches, on the thread of the backward
            pass.
        took: Function that gets the seconds that ``reached`` has taken.
    """

    def __init__(
        self,
        reached: Callable[[int], None],
        diagnostics: Diagnostics,
        took: Callable[[float], object],
    ) -> None:
        self._reached: Callable[[int], None] | None = reached
        self._diagnostics = diagnostics
        self._took = took
        self._marked: set[int] = set()

    def close(self) -> None:
        """Disable the hooks. Call this at the end of the window."""
        self._reached = None

    def mark(self, values: Any, layer: int) -> None:
        """Mark tensors as made by ``layer``.

        Skip tensors that are marked already: a module inside ``layer`` made them.
        """
        for tensor in tensors_in(values):
            node = tensor.grad_fn
            if node is None:
                continue
            number = internals.sequence_number(node)
            if number is None or number in self._marked or len(self._marked) >= MAX_RANGES:
                continue
            self._marked.add(number)
            node.register_prehook(partial(self._on_backward, layer))

    def _on_backward(self, layer: int, _gradients: Any) -> None:
        if self._reached is not None:
            began = thread_time()
            with self._diagnostics.contained("following the backward pass"):
                self._reached(layer)
                self._took(thread_time() - began)
