"""Modules that a training step calls first, without gradients: a teacher, a target network.

A call without gradients may belong to a training step, or to an evaluation between two steps. The call counts
as part of a step if the last traced step began with a call of the same module.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any


class FrozenStart:
    """Frozen module: a module that a step calls first, without gradients. The module is held weakly.

    Attributes:
        missed: True if the step called the frozen module before the window opened. The trace lacks this call.
    """

    def __init__(self) -> None:
        self.missed = False
        self._last_start: weakref.ref[Any] | None = None
        self._thread: int | None = None
        self._first_called: dict[int, weakref.ref[Any]] = {}
        self._matches = False

    def reset(self) -> None:
        """Forget the calls so far. Call this before the next step begins."""
        self._first_called = {}
        self._matches = False

    def is_step_start(self, module: Any) -> bool:
        """Return whether a window should open at this call of ``module``, a module that is not trained.

        Return True if the last traced step ran on this thread, and began with a call of ``module``. Other
        threads may call modules to prepare data.
        """
        thread = threading.get_ident()
        if thread in self._first_called:
            return False
        self._first_called[thread] = weakref.ref(module)
        if thread != self._thread:
            return False
        usual = self._last_start() if self._last_start is not None else None
        self._matches = usual is module
        return self._matches

    def window_opened(self) -> None:
        """Remember which module this thread called first in the step, and set `missed`.

        Call this when a window opens.
        """
        self._thread = threading.get_ident()
        self._last_start = self._first_called.get(self._thread)
        self.missed = self._last_start is not None and not self._matches
        self.reset()

    def forget(self) -> None:
        """Forget the module with which the last traced step began.

        Call this when a window is abandoned. The calls before that window were not part of a training step.
        """
        self._last_start = None
