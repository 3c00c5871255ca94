"""Search for gradients that a program computes, or prepares to compute, and never uses."""

from __future__ import annotations

import time
from collections.abc import Callable

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event, Finding
from memlog.leaks.unowned_gradients import UnownedGradients
from memlog.leaks.unused_graphs import UnusedGraphs
from memlog.leaks.watched_storages import may_watch

_FIRST = 8
"""Number of steps before the first look at all parameters."""
_FACTOR = 8
"""Factor by which the step number rises from one look to the next: steps 8, 64, 512 and so on."""
_SHARE = 0.005
"""Maximum fraction of the run's time for looking at all parameters. Above this fraction, no further look
begins."""


class WastedGradients:
    """Search for unused gradients, on the training thread of a session that traces layers.

    No method raises.
    """

    def __init__(self, publish: Callable[[Event], object], diagnostics: Diagnostics) -> None:
        self._publish = publish
        self._diagnostics = diagnostics
        self._unowned: UnownedGradients | None = UnownedGradients(diagnostics)
        self._unused: UnusedGraphs | None = UnusedGraphs(diagnostics)
        self._begun = time.monotonic()
        self._spent = 0.0
        self._steps = 0
        self._next_look = _FIRST

    @property
    def watching(self) -> bool:
        """True while iterations are watched with a dispatch mode."""
        return self._unowned is not None and self._unowned.watching

    def after_step(self, step: int, *, busy: bool) -> None:
        """Continue the search after an optimizer step.

        If ``busy`` is true, this search does not begin to watch iterations, because the next step is watched
        by the tracer or by the search for the cause of a growth.
        """
        self._steps += 1
        with self._diagnostics.contained("looking for unused gradients"):
            self._look_for_unowned(step, busy=busy)
            self._look_for_unused(step)

    def finish(self, step: int | None) -> None:
        """Judge a last time, and remove all hooks and modes of the search from torch."""
        with self._diagnostics.contained("looking for unused gradients"):
            if self._unused is not None and step is not None:
                self._unused.judge(step)
                self._unused.stop()
                self._take(self._unused.finding)
            if self._unowned is not None:
                self._unowned.stop()

    def _look_for_unused(self, step: int) -> None:
        if self._unused is not None:
            self._unused.step_ended(step)
            if self._take(self._unused.finding):
                self._unused = None

    def _look_for_unowned(self, step: int, *, busy: bool) -> None:
        search = self._unowned
        if search is None or (busy and not search.watching):
            return
        if search.watching or search.pending:
            if search.watching or may_watch():
                search.step_ended(step)
        elif self._steps >= self._next_look and may_watch():
            began = time.monotonic()
            if self._spent <= _SHARE * (began - self._begun):
                search.look(step)
                self._spent += time.monotonic() - began
                self._next_look = _FACTOR * self._steps
        if self._take(search.finding):
            self._unowned = None

    def _take(self, finding: Finding | None) -> bool:
        if finding is not None:
            self._publish(finding)
        return finding is not None
