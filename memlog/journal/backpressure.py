"""Drop most steps while a journal is far above its limit, until the helper process has made it smaller."""

from __future__ import annotations

import os
import time
from pathlib import Path

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Event, readings

LOOK_EVERY_S = 1.0
"""Seconds between measurements of the journal's size while the journal is too large."""
EVERY = 1_000
"""Maximum number of steps from one written step to the next, while the journal is too large."""


class Backpressure:
    """Filter that drops most steps while the journal is too large. Steps with a new peak are always kept.

    Above ``limit`` bytes, the helper process makes the run's journal smaller. Above 1.5 times the limit, the
    journal is too large. If ``limit`` is ``None``, the journal is never too large.
    """

    def __init__(self, directory: Path, limit: int | None, diagnostics: Diagnostics) -> None:
        self._directory = directory
        self._ceiling = None if limit is None else limit * 3 // 2
        self._diagnostics = diagnostics
        self._next_look = 0.0
        self._highest: dict[str, int] = {}
        self._since_written = 0
        self.active = False
        """True while the journal is too large."""

    def measure(self) -> None:
        if self._ceiling is not None:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            self.active = self._folder_size() > self._ceiling

    def admits(self, event: Event) -> bool:
        """Return True if ``event`` is to be written. Otherwise count the event as dropped."""
        if not isinstance(event, Batch):
            return True
        if time.monotonic() >= self._next_look:
            self.measure()
        self._since_written += 1
        if self._has_new_peak(event) or self._since_written >= EVERY or not self.active:
            self._since_written = 0
            return True
        self._diagnostics.drop(
            "journal_full",
            f"the journal in {self._directory} is larger than its limit. Until its helper process has made "
            f"it smaller, memlog writes only steps with a new peak and one in {EVERY:,} of the others: pass "
            "a larger journal_limit to keep more",
        )
        return False

    def _has_new_peak(self, event: Batch) -> bool:
        sizes = {each.name: each.peak for each in readings(event)}
        higher = {
            name: size
            for name, size in sizes.items()
            if size is not None and size > self._highest.get(name, -1)
        }
        self._highest.update(higher)
        return bool(higher)

    def _folder_size(self) -> int:
        try:
            with os.scandir(self._directory) as entries:
                # With the bytes that running processes have allocated ahead. To leave these out, every file
                # would have to be opened.
                return sum(e.stat().st_size for e in entries if e.name.endswith(".jsonl"))
        except OSError:
            # The folder was deleted or can't be read, or a segment was just replaced: measure again later.
            return 0
