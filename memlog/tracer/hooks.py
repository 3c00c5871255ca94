"""Hearing of modules and optimizers at work, through torch's global hooks.

Nothing is put on a module or a parameter: a hook there would be pickled with the model, and full backward
hooks break models with in-place activations. In a compiled graph the hooks are nothing at all.
"""

from __future__ import annotations

import sys
import warnings
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

from memlog.health import Health


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
        self._warning: Any = None

    def install(self) -> None:
        """Puts the hooks in: all of them or none."""
        self._warning = _silence_compiled_modules()
        begins, ends = self._module_hooks()
        try:
            self._handles.append(register_module_forward_pre_hook(begins))
            self._handles.append(register_module_forward_hook(ends, always_call=True))
            self._handles.append(
                register_optimizer_step_pre_hook(
                    self._optimizer_hook(self._listener.optimizer_begins)
                )
            )
            self._handles.append(
                register_optimizer_step_post_hook(
                    self._optimizer_hook(self._listener.optimizer_ends)
                )
            )
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes them out again. Calling it again is harmless."""
        while self._handles:
            self._handles.pop().remove()
        if self._warning in warnings.filters:
            warnings.filters.remove(self._warning)  # type: ignore[attr-defined] # it is a list, whatever typeshed says

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

    def _optimizer_hook(self, tell: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
        health, compiling = self._health, torch.compiler.is_compiling

        def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if compiling():
                return
            try:
                tell(optimizer)
            except Exception as error:  # noqa: BLE001 - training goes on
                health.fault("noticing an optimizer's step", error)

        return hook


def _silence_compiled_modules() -> Any:
    """Keeps our hooks from costing the user a warning (an error, where warnings are) at each compiled module.

    Returns:
        The filter, to be taken out again; ``None`` where nothing has been compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return None
    text = r"Using `torch\.compile\(module\)` when there are global hooks"
    warnings.filterwarnings("ignore", message=text)
    return warnings.filters[0]
