"""Closed windows whose dispatch mode could not be removed yet.

Another mode lies on top, or the window was closed on another thread than the one that opened it. A hook tries
again at each module call.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from memlog._internal import fork
from memlog.tracer.hooks.warning_filter import COMPILE_WARNING_FILTER


class ClosedWindow(Protocol):
    """A closed window, or its engine."""

    def leave(self) -> bool:
        """Try to remove what is left; return True once nothing is left in torch. Never raises."""


class _Waiting:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: list[ClosedWindow] = []
        self._handle: Any = None

    def add(self, window: ClosedWindow) -> None:
        with self._lock:
            self._windows.append(window)
            if self._handle is None:
                COMPILE_WARNING_FILTER.add(self)
                self._handle = register_module_forward_pre_hook(_module_called)

    def attempt(self) -> None:
        if not self._windows or not self._lock.acquire(blocking=False):
            return  # another thread is doing it
        try:
            self._windows = [window for window in self._windows if not window.leave()]
            if not self._windows and self._handle is not None:
                self._handle.remove()
                self._handle = None
                COMPILE_WARNING_FILTER.remove(self)
        finally:
            self._lock.release()


_waiting = _Waiting()
fork.renew(_waiting, "_lock", threading.Lock)


def remove_when_possible(window: ClosedWindow) -> None:
    """Remove what is left of a closed window: now if possible, else at a later module call."""
    if not window.leave():
        _waiting.add(window)
    else:
        _waiting.attempt()  # its mode may have covered one that waits


def remove_waiting() -> None:
    """Remove what can be removed on this thread now."""
    _waiting.attempt()


def _module_called(_module: Any, _inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        _waiting.attempt()
