"""Write fewer steps while a journal is far above its limit, until its helper process has made it smaller."""

from __future__ import annotations

import os
import time
from pathlib import Path

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Evaluation, Event, Loss, Recorded, Scope

LOOK_EVERY_S = 1.0
"""Seconds between measurements of a journal that is too large."""
PEAK_WINDOW = 1_000
"""Consecutive steps of which only the peaks are written while the journal is too large."""

_FREQUENT = (Loss, Evaluation, Recorded, Scope)
"""Events that may come at every step: they do not end a window."""


class Backpressure:
    """Measures the journal and, while it is too large, defers steps and drops those without a peak.

    A step with a higher peak than all steps before is written at once. Of the others, those that hold the
    greatest value in a window are written when the window ends: after `PEAK_WINDOW` steps, before any rare
    event, or when the journal is small enough again.

    Args:
        directory: The run's folder.
        limit: Maximum bytes of its journal; ``None``: no limit. The journal is too large above 1.5 times the
            limit; below that, the helper process makes it smaller.
        diagnostics: Counts the steps that are dropped.
    """

    def __init__(self, directory: Path, limit: int | None, diagnostics: Diagnostics) -> None:
        self._directory = directory
        self._ceiling = None if limit is None else limit * 3 // 2
        self._diagnostics = diagnostics
        self._next_look = 0.0
        self._highest: dict[str, int] = {}
        self._window = _PeakWindow()
        self.active = False
        """True while the journal is too large."""

    def measure(self) -> None:
        """Measure the journal's size."""
        if self._ceiling is not None:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            self.active = self._folder_size() > self._ceiling

    def admit(self, event: Event) -> tuple[Event, ...]:
        """Return the events to write now that ``event`` comes: deferred ones before it, or none."""
        if isinstance(event, _FREQUENT):
            return (event,)
        if not isinstance(event, Batch):
            return (*self.take_deferred(), event)
        if time.monotonic() >= self._next_look:
            self.measure()
        peaks = _peaks(event)
        higher = {n: size for n, size in peaks.items() if size > self._highest.get(n, -1)}
        if higher or not self.active:
            self._highest.update(higher)
            return (*self.take_deferred(), event)
        self._window.add(event, peaks)
        if self._window.steps >= PEAK_WINDOW:
            return self.take_deferred()
        return ()

    def take_deferred(self) -> tuple[Batch, ...]:
        """End the window: return its steps with a peak, and count the others as dropped."""
        window, self._window = self._window, _PeakWindow()
        if not window.steps:
            return ()
        kept = window.greatest()
        if len(kept) < window.steps:
            self._diagnostics.drop(
                "journal_full",
                f"the journal in {self._directory} is larger than its limit (journal_limit): until its "
                "helper process has made it smaller, only steps with a peak are written",
                count=window.steps - len(kept),
            )
        return kept

    def _folder_size(self) -> int:
        try:
            with os.scandir(self._directory) as entries:
                return sum(e.stat().st_size for e in entries if e.name.endswith(".jsonl"))
        except OSError:
            # The folder was deleted or can't be read, or a segment was just replaced: measure again later.
            return 0


class _PeakWindow:
    """Consecutive steps, of which those with the greatest value of any kind are kept."""

    def __init__(self) -> None:
        self.steps = 0
        self._greatest: dict[str, tuple[int, Batch]] = {}

    def add(self, event: Batch, peaks: dict[str, int]) -> None:
        self.steps += 1
        for name, size in peaks.items():
            greatest = self._greatest.get(name)
            if greatest is None or size > greatest[0]:
                self._greatest[name] = size, event

    def greatest(self) -> tuple[Batch, ...]:
        """Return the kept events, in the order in which they came."""
        events = {id(event): event for _, event in self._greatest.values()}
        return tuple(sorted(events.values(), key=lambda event: event.step))


def _peaks(event: Batch) -> dict[str, int]:
    sizes = {"host": event.rss_peak, **{device.name: device.peak for device in event.devices}}
    return {name: size for name, size in sizes.items() if size is not None}
