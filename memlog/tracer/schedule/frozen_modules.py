"""What a training step calls before the first module that is trained: a teacher, a target network.

Without gradients a call may belong to the step, or to an evaluation between two of them. It belongs to the
step where the step that was traced last began with a call of the same module, too.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any


class FrozenStart:
    """Remembers the first module that was called without being trained, held weakly.

    Attributes:
        missed: Whether the window that was opened last began behind one.
    """

    def __init__(self) -> None:
        self.missed = False
        self._last_start: weakref.ref[Any] | None = None
        self._thread: int | None = None
        self._first_called: dict[int, weakref.ref[Any]] = {}
        self._matches = False

    def reset(self) -> None:
        """A step is waited for; what was called before is none of it."""
        self._first_called = {}
        self._matches = False

    def is_step_start(self, module: Any) -> bool:
        """Whether the window is to begin with a module, which is not trained.

        Other threads than the one that trained call modules, too: to prepare the data, for example.
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
        """The window begins."""
        self._thread = threading.get_ident()
        self._last_start = self._first_called.get(self._thread)
        self.missed = self._last_start is not None and not self._matches
        self.reset()

    def forget(self) -> None:
        """The window had no end: what it began with was no part of a step."""
        self._last_start = None
