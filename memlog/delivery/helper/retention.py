"""Keeping a run's journal within its size limit.

The helper does it, segment by segment, and only with segments that their process has closed. First go
those that every sink has had: of each no more is kept than what is rare (what began, alerts, epochs,
artifacts, …) and its peaks. Where that is not enough, because a tracker is out of reach or there is none,
the others are thinned, the oldest first and all of them a little before any of them more: of a hundred
events in a row, then of a thousand, then of ten thousand, the peaks and the last are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from memlog._internal.units import format_bytes
from memlog.events import Batch, Evaluation, Event, Health, Loss, Recorded, Sample, Scope
from memlog.journal import JournalFile, RunDirectory
from memlog.journal.compaction import WHOLE_SEGMENT, compact, compacted_window
from memlog.journal.delivery_state import Progress, UploadState
from memlog.metrics import values
from memlog.sink import LOCAL

logger = logging.getLogger("memlog.delivery")

INTERVAL = 1.0
"""Seconds between looks at the journal's size."""
_AT_A_TIME = 0.5
"""Seconds after which a large journal waits for the helper's other work."""
WINDOWS = (100, 1_000, 10_000, WHOLE_SEGMENT)
_SHRINK_TO = 0.9
"""Part of the limit to which the journal is made to shrink, so that not every event is one too many."""


class _Segment(NamedTuple):
    """A closed segment that can be made smaller."""

    path: Path
    window: int
    delivered: bool


class Retention:
    """Keeps one run's journal small enough.

    Args:
        run: The run.
        limit: Bytes that all its segments together may take.
        backends: Those that the run was told to deliver to; others show by what uploaders keep.
    """

    def __init__(self, run: RunDirectory, limit: int, backends: Collection[str] = ()) -> None:
        self._run = run
        self._limit = limit
        self._named = set(backends) - {LOCAL}
        self._windows: dict[Path, int | None] = {}
        self._shrinking = self._said = False
        self._due = 0.0

    def enforce_if_due(self) -> None:
        """Makes segments smaller until the journal is small enough, or others need the thread."""
        begun = time.monotonic()
        if begun < self._due:
            return
        self._due = (
            begun + INTERVAL
        )  # also where it fails: a full disk is still full at the next tick
        while self.enforce():
            if time.monotonic() - begun >= _AT_A_TIME:
                self._due = 0.0
                return

    def enforce(self) -> bool:
        """Makes one segment smaller, where the journal is too large; says whether it did."""
        files = self._run.files()
        total = sum(file.size for file in files)
        self._shrinking = total > (self._limit * _SHRINK_TO if self._shrinking else self._limit)
        segment = self._next(files) if self._shrinking else None
        if segment is None:
            return False
        window = WHOLE_SEGMENT if segment.delivered else _next_window(segment.window)
        try:
            gone = compact(segment.path, window, _levels, delivered=segment.delivered)
        except ValueError:
            self._windows[segment.path] = None  # damaged: better left alone
            return True
        self._windows[segment.path] = window
        self._say(segment, gone)
        return True

    def _next(self, files: Collection[JournalFile]) -> _Segment | None:
        segments = list(self._closed(files))
        delivered = next((segment for segment in segments if segment.delivered), None)
        return delivered or min(segments, key=lambda segment: segment.window, default=None)

    def _closed(self, files: Collection[JournalFile]) -> Iterator[_Segment]:
        """The segments that can still be made smaller, the oldest of each process first."""
        states = self._states()
        for file in files:
            for number in file.segments[:-1]:  # the last one is being written
                path = file.path(number)
                window = self._window(path)
                if window is not None and window < WHOLE_SEGMENT:
                    yield _Segment(path, window, _is_delivered(states, file.process, number))

    def _window(self, path: Path) -> int | None:
        if path not in self._windows:
            self._windows[path] = compacted_window(path)
        return self._windows[path]

    def _states(self) -> list[UploadState]:
        """What each sink's uploader has kept: that, and no more, will not be asked for again."""
        uploaders = {
            path.stem for path in self._run.delivery.iterdir() if path.suffix in (".json", ".lock")
        }
        return [UploadState.load(self._run, name) for name in sorted(self._named | uploaders)]

    def _say(self, segment: _Segment, gone: int) -> None:
        logger.info("%s: %d events thinned", segment.path.name, gone)
        if not segment.delivered and not self._said:
            self._said = True
            logger.warning(
                "the journal has reached its limit of %s (journal_limit) before every tracker had it: "
                "older steps are thinned, every peak and alert is kept",
                format_bytes(self._limit),
            )


def _is_delivered(states: Collection[UploadState], process: str, segment: int) -> bool:
    """Whether every sink has had a whole segment; ``False`` where there is no sink."""
    return bool(states) and all(_has_had(state, process, segment) for state in states)


def _has_had(state: UploadState, process: str, segment: int) -> bool:
    held = [stretch for stretch in state.held.values() if stretch.process == process]
    return segment < _needed(state.files.get(process, Progress())) and not any(
        _needed(stretch.progress) <= segment < stretch.until.segment for stretch in held
    )


def _needed(progress: Progress) -> int:
    """The number of the first segment that a sink has not had whole.

    It may still need the steps of its open bucket; what else is open is always kept.
    """
    return min((progress.open or {}).get("step", progress.sent), progress.sent).segment


def _next_window(window: int) -> int:
    return next(wider for wider in WINDOWS if wider > window)


def _levels(event: Event) -> dict[str, float] | None:
    """What makes an event a peak; ``None`` where it is too rare to go."""
    if isinstance(event, (Batch, Loss, Evaluation, Sample, Health)):
        # The machine's available memory is lowest where it is scarcest.
        return {
            name: -value if fold == "min" else value
            for name, value, fold in values(event)
            if value is not None
        }
    if isinstance(event, (Recorded, Scope)):
        rss = event.rss if isinstance(event, Recorded) else event.rss_change
        sizes = {"rss": rss, **{device.name: device.peak for device in event.devices}}
        return {name: float(size) for name, size in sizes.items() if size is not None}
    return None
