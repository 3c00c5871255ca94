"""Closed windows whose dispatch mode could not be removed yet.

A mode can't be removed while another mode lies on top of it on the stack. It also can't be removed if one
thread opened the window and another thread closed it. At each module call, a hook tries again to remove the
mode.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from memlog.tracer.hooks.shared_hook import SharedHook
from memlog.tracer.hooks.warning_filter import COMPILE_WARNING_FILTER


class ClosedWindow(Protocol):
    """Closed window, or the engine of a closed window."""

    def leave(self) -> bool:
        """Try to remove what the window has left in torch. Return True if nothing is left. Never raise."""


class _WaitingWindows(SharedHook[ClosedWindow]):
    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def attempt(self) -> None:
        """Remove the modes that can be removed on this thread now."""
        for window in self.holders:
            if window.leave():
                self.remove(window)

    def _install(self) -> None:
        COMPILE_WARNING_FILTER.add(self)
        self._handle = register_module_forward_pre_hook(_module_called)

    def _uninstall(self) -> None:
        self._handle.remove()
        COMPILE_WARNING_FILTER.remove(self)


_waiting = _WaitingWindows()
remove_waiting = _waiting.attempt


def remove_when_possible(window: ClosedWindow) -> None:
    """Remove from torch what is left of a closed window: now if possible, else at a later module call."""
    if not window.leave():
        _waiting.add(window)
    else:
        _waiting.attempt()  # the removed mode may have been on top of one that waits


def _module_called(_module: Any, _inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        _waiting.attempt()
