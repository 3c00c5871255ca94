"""Size limit of a run's journal.

To keep the limit, the helper thins one segment after another. It thins a segment only if the process that
wrote the segment has closed it. Of a thousand consecutive events of one kind, the helper keeps the peaks and
the last event. Rare events (the run's begin, alerts, epochs, artifacts, …) all stay. The helper begins with
segments that every sink has received. If the journal is still too large, for example because no tracker can
be reached or the run has no tracker, the helper also thins the other segments, the oldest first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from memlog._internal.terminal import format_bytes
from memlog.events import (
    Batch,
    Evaluation,
    Event,
    Health,
    Loss,
    Phase,
    PinnedMemory,
    Ranks,
    Recorded,
    Sample,
    Scope,
    changes,
    main_readings,
    readings,
)
from memlog.journal import JournalFile, RunDirectory
from memlog.journal.delivery_state import Progress, UploadState
from memlog.journal.segments import compact, is_compactable
from memlog.metrics import values
from memlog.sink import LOCAL

logger = logging.getLogger("memlog.delivery")

INTERVAL = 1.0
"""Seconds between checks of the journal's size."""
_AT_A_TIME = 0.5
"""Seconds of thinning without a pause. In each pause, the helper does its other work."""
WINDOW = 1_000
"""Size of a group of consecutive events of one kind. Thinning keeps only the peaks and the last event of each
group."""
_SHRINK_TO = 0.9
"""Fraction of the limit to which the journal shrinks, so that the next events do not exceed the limit."""


class _Segment(NamedTuple):
    """Closed segment that can be made smaller."""

    path: Path
    delivered: bool


class Retention:
    """Size limit of one run's journal: maximum bytes of all of the run's segments together.

    ``backends`` are the backends in the run's settings. The run may have other backends, too. `Retention`
    finds these by the files of their uploaders in the run's folder.
    """

    def __init__(self, run: RunDirectory, limit: int, backends: Collection[str] = ()) -> None:
        self._run = run
        self._limit = limit
        self._named = set(backends) - {LOCAL}
        self._compactable: dict[Path, bool] = {}
        self._shrinking = self._warned = False
        self._due = 0.0

    def enforce_if_due(self) -> None:
        """If a check is due, shrink a journal that is too large. Stop after about `_AT_A_TIME` seconds."""
        begun = time.monotonic()
        if begun < self._due:
            return
        # Set before the work: after a failure, as on a full disk, the next attempt must not come at once.
        self._due = begun + INTERVAL
        while self.enforce():
            if time.monotonic() - begun >= _AT_A_TIME:
                self._due = 0.0
                return

    def enforce(self) -> bool:
        """Make one segment smaller if the journal is too large; return False if there was nothing to do."""
        files = self._run.files()
        total = sum(file.size for file in files)
        self._shrinking = total > (self._limit * _SHRINK_TO if self._shrinking else self._limit)
        segment = self._next(files) if self._shrinking else None
        if segment is None:
            return False
        removed = compact(segment.path, WINDOW, _levels, delivered=segment.delivered)
        self._report(segment, removed)
        self._compactable[segment.path] = False
        return True

    def _next(self, files: Collection[JournalFile]) -> _Segment | None:
        segments = list(self._closed(files))
        delivered = (segment for segment in segments if segment.delivered)
        return next(delivered, segments[0] if segments else None)

    def _closed(self, files: Collection[JournalFile]) -> Iterator[_Segment]:
        """Yield the closed segments that can be made smaller. The segments of a process come oldest first."""
        states = self._states()
        for file in files:
            for number in file.segments[:-1]:  # the last one is being written
                path = file.path(number)
                if path not in self._compactable:
                    self._compactable[path] = is_compactable(path)
                if self._compactable[path]:
                    yield _Segment(path, _is_delivered(states, file.process, number))

    def _states(self) -> list[UploadState]:
        """Return the saved state of each sink's uploader. It tells how much of the journal is delivered."""
        uploaders = {
            path.stem for path in self._run.delivery.iterdir() if path.suffix in (".json", ".lock")
        }
        return [UploadState.load(self._run, name) for name in sorted(self._named | uploaders)]

    def _report(self, segment: _Segment, removed: int) -> None:
        logger.info("%s: %d events thinned", segment.path.name, removed)
        if not segment.delivered and not self._warned:
            self._warned = True
            logger.warning(
                "the journal reached its limit of %s: memlog removes events of older steps (never a peak or "
                "an alert), also those that are not delivered yet; pass a larger journal_limit to keep more",
                format_bytes(self._limit),
            )


def _is_delivered(states: Collection[UploadState], process: str, segment: int) -> bool:
    """Return whether every sink has received the complete segment; ``False`` if there is no sink."""
    return bool(states) and all(_has_received(state, process, segment) for state in states)


def _has_received(state: UploadState, process: str, segment: int) -> bool:
    ranges = [deferred for deferred in state.deferred.values() if deferred.process == process]
    return segment < _needed(state.files.get(process, Progress())) and not any(
        _needed(deferred.progress) <= segment < deferred.until.segment for deferred in ranges
    )


def _needed(progress: Progress) -> int:
    """Return the number of the first segment that a sink has not received completely.

    The uploader groups steps into buckets, and sends one point of each metric for a bucket. A bucket is open
    until the uploader reads a step of the next bucket. A segment with events of an open bucket does not count
    as received. For epochs and evaluations, open buckets are ignored.
    """
    return min((progress.open or {}).get("step", progress.sent), progress.sent).segment


def _levels(event: Event) -> dict[str, float] | None:
    """Return an event's values, to find the peaks; ``None`` for a rare event, which is always kept."""
    if isinstance(event, (Batch, Loss, Evaluation, Sample, PinnedMemory, Health, Ranks)):
        # For available memory, the lowest value is the peak. When negated, it is the largest.
        return {
            name: -value if fold == "min" else value
            for name, value, fold in values(event)
            if value is not None
        }
    if isinstance(event, Phase):
        return {
            f"{event.label} {reading.name}": float(reading.peak)
            for reading in readings(event)
            if reading.peak is not None
        }
    if isinstance(event, (Recorded, Scope)):
        recorded = changes(event) if isinstance(event, Scope) else main_readings(event)
        sizes = {
            reading.name: reading.level if reading.device is None else reading.peak
            for reading in recorded
        }
        return {name: float(size) for name, size in sizes.items() if size is not None}
    return None
