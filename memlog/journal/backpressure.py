"""What a journal that has outgrown its limit still takes, until its helper has made it smaller."""

from __future__ import annotations

import os
import time
from pathlib import Path

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Evaluation, Event, Loss, Recorded, Scope

LOOK_EVERY_S = 1.0
"""Seconds between looks at the size of a journal that is too large."""
STRETCH = 1_000
"""Steps in a row of which the peaks are written, while the journal is too large."""

_FREQUENT = (Loss, Evaluation, Recorded, Scope)
"""What may come at every step: it does not end a stretch."""


class Room:
    """Knows whether the journal is too large, and holds back the steps that it has no room for then.

    A step with a peak above all before it is written at once. Of the others, those that hold the greatest
    value of a stretch are written at its end: after so many steps, before any rare event, and when there
    is room again.

    Args:
        directory: The run's folder.
        limit: Bytes that its journal may take; ``None``: any number. It is too large where it is half as
            large again: until then its size is the helper's business.
        diagnostics: Where steps that are not written are counted.
    """

    def __init__(self, directory: Path, limit: int | None, diagnostics: Diagnostics) -> None:
        self._directory = directory
        self._ceiling = None if limit is None else limit * 3 // 2
        self._diagnostics = diagnostics
        self._next_look = 0.0
        self._highest: dict[str, int] = {}
        self._stretch = _Stretch()
        self.scarce = False
        """Whether the journal is too large."""

    def look(self) -> None:
        """Looks at the journal's size."""
        if self._ceiling is not None:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            self.scarce = self._folder_size() > self._ceiling

    def allot(self, event: Event) -> tuple[Event, ...]:
        """What is to be written now that ``event`` comes and the journal was too large: all, or nothing."""
        if isinstance(event, _FREQUENT):
            return (event,)
        if not isinstance(event, Batch):
            return (*self.take_held(), event)
        if time.monotonic() >= self._next_look:
            self.look()
        peaks = _peaks(event)
        higher = {n: size for n, size in peaks.items() if size > self._highest.get(n, -1)}
        if higher or not self.scarce:
            self._highest.update(higher)
            return (*self.take_held(), event)
        self._stretch.add(event, peaks)
        if self._stretch.steps >= STRETCH:
            return self.take_held()
        return ()

    def take_held(self) -> tuple[Batch, ...]:
        """The steps with the peaks of the stretch, which ends; what else was in it is lost, and counted."""
        stretch, self._stretch = self._stretch, _Stretch()
        if not stretch.steps:
            return ()
        held = stretch.greatest()
        if len(held) < stretch.steps:
            self._diagnostics.drop(
                "journal_full",
                f"the journal in {self._directory} is larger than its limit (journal_limit): until its "
                "helper process has made it smaller, only steps with a peak are written",
                count=stretch.steps - len(held),
            )
        return held

    def _folder_size(self) -> int:
        try:
            with os.scandir(self._directory) as entries:
                return sum(e.stat().st_size for e in entries if e.name.endswith(".jsonl"))
        except OSError:
            # The folder is gone, can't be read, or a segment was replaced just now: the next look tells.
            return 0


class _Stretch:
    """Steps in a row, of which those with the greatest value of anything are held."""

    def __init__(self) -> None:
        self.steps = 0
        self._greatest: dict[str, tuple[int, Batch]] = {}

    def add(self, event: Batch, peaks: dict[str, int]) -> None:
        self.steps += 1
        for name, size in peaks.items():
            held = self._greatest.get(name)
            if held is None or size > held[0]:
                self._greatest[name] = size, event

    def greatest(self) -> tuple[Batch, ...]:
        """The events that are held, in the order in which they came."""
        events = {id(event): event for _, event in self._greatest.values()}
        return tuple(sorted(events.values(), key=lambda event: event.step))


def _peaks(event: Batch) -> dict[str, int]:
    sizes = {"host": event.rss_peak, **{device.name: device.peak for device in event.devices}}
    return {name: size for name, size in sizes.items() if size is not None}
