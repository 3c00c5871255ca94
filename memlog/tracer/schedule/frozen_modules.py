"""What a training step calls before the first module that is trained: a teacher, a target network.

Without gradients a call may belong to the step, or to an evaluation between two of them. It belongs to the
step where the step that was traced last began with a call of the same module, too.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any


class Forerunner:
    """Remembers the first module that was called without being trained, held weakly.

    Attributes:
        missed: Whether the window that was opened last began behind one.
    """

    def __init__(self) -> None:
        self.missed = False
        self._usual: weakref.ref[Any] | None = None
        self._thread: int | None = None
        self._met: dict[int, weakref.ref[Any]] = {}
        self._leads = False

    def step_begins(self) -> None:
        """A step is waited for; what was called before is none of it."""
        self._met = {}
        self._leads = False

    def comes(self, module: Any) -> bool:
        """Whether the window is to begin with a module, which is not trained.

        Other threads than the one that trained call modules, too: to prepare the data, for example.
        """
        thread = threading.get_ident()
        if thread in self._met:
            return False
        self._met[thread] = weakref.ref(module)
        if thread != self._thread:
            return False
        usual = self._usual() if self._usual is not None else None
        self._leads = usual is module
        return self._leads

    def begin(self) -> None:
        """The window begins."""
        self._thread = threading.get_ident()
        self._usual = self._met.get(self._thread)
        self.missed = self._usual is not None and not self._leads
        self.step_begins()

    def forget(self) -> None:
        """The window had no end: what it began with was no part of a step."""
        self._usual = None
