"""Garbage of the training process, collected while its growth is judged.

Garbage can look like growth of the training process, or of the memory that tensors hold on a device. So all
garbage is collected before the detector suspects such growth, and again before it confirms such growth. After
the last step, garbage is collected only for growth that has not passed such a collection: by then, the
program's functions have returned, and a collection would also free what they held.
"""

from __future__ import annotations

from time import monotonic, thread_time
from typing import NamedTuple

from memlog.events import ALLOCATED, HOST_ANON
from memlog.growth.suspicion import Suspicion
from memlog.leaks.time_budget import seconds_allowed
from memlog.probes.garbage import collect_garbage, device_in_use, heap_in_use

_GARBAGE = 0.25
"""If the collected garbage is less than this fraction of the growth, it is not the growth's cause."""
_COLLECTING = 2.0
"""Maximum processor seconds of the detector's garbage collections; in a long run, 1 % of the run's time.
Beyond the maximum, the detector collects only young garbage, which has not survived two collections yet."""
_BEFORE_SUSPICION = 0.5
"""Fraction of `_COLLECTING`. Beyond it, the collections before a suspicion are only of young garbage. The
rest of the time is for the collections before a confirmation."""


class _Collected(NamedTuple):
    """Step of the last garbage collection, and bytes in use after the collection."""

    step: int
    left: int


class TrainersMemory:
    """Garbage of this process."""

    def __init__(self) -> None:
        self._collected: dict[str, _Collected] = {}
        """For each series, the newest collection that explained a growth of the series."""
        self._collected_all: set[str] = set()
        """Series whose newest collection was one of all garbage."""
        self._collecting = 0.0
        self._begun = monotonic()

    def is_garbage(
        self, growth: Suspicion, *, is_confirmed: bool, has_ended: bool, is_early: bool = False
    ) -> bool:
        """Collect garbage. Return True if the garbage explains the growth.

        The growth is that of this process, or of the memory that tensors hold on a device. ``is_confirmed``
        is true if the growth has lasted, and false if it is only suspected so far. ``has_ended`` is true
        after the last step, for growth that was suspected before.

        Garbage can hide a leak. If the bytes left after collections grow at least half as fast as ``growth``,
        return False. Old garbage is collected, too, while time is left (`_COLLECTING`), unless ``is_early``.
        """
        series = growth.series if growth.series.endswith(ALLOCATED) else HOST_ANON
        if has_ended and series in self._collected_all:
            return False
        share = 1.0 if is_confirmed else _BEFORE_SUSPICION
        old = not is_early and self._collecting < share * seconds_allowed(_COLLECTING, self._begun)
        (self._collected_all.add if old else self._collected_all.discard)(series)
        began = thread_time()
        device = series.removesuffix(ALLOCATED)
        in_use = heap_in_use if device == series else lambda: device_in_use(device)
        found = collect_garbage(old=old, in_use=in_use)
        self._collecting += thread_time() - began
        rise = growth.rate * (growth.step - growth.since_step)
        if found is None or found.freed < _GARBAGE * rise:
            return False
        before = self._collected.get(series)
        self._collected[series] = _Collected(growth.step, found.left)
        if before is None or before.step >= growth.step:
            return True
        return (found.left - before.left) / (growth.step - before.step) < growth.rate / 2
