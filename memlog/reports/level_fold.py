"""Aggregate the memory in use after each step, and find the step since which memory is steady."""

from __future__ import annotations

from statistics import median_low

from memlog.events import Batch

_MOST = 512
"""Maximum number of intervals of a series. If there are more, every two neighbours become one interval."""
_TOLERANCE = 0.02
"""Tolerance, as a share of the memory after the last step. If the values of a step and of all later
steps are within the tolerance, memory is steady since that step."""
_LEAST_TOLERANCE = 8 * 1024**2
"""Minimum of the tolerance, in bytes. Allocators and the interpreter take and return pages even if little
memory is in use."""
_DRIFT = 1024**2
"""Rise in bytes. memlog compares three successive parts of the steps that seem steady. If the median rises by
more than this value from each part to the next, memory is not steady."""
MIN_STEPS = 10
"""If there are fewer steps than this, memory does not count as steady."""
_LEAST_PART = 4
"""Divisor of the number of steps: 4 means that memory must be steady over at least the last quarter of all
steps. A shorter steady time can be a pause in the growth."""
HOST = "host"


class LevelFold:
    """Memory in use after the steps, of the process and of each device.

    Only the lowest value of each interval of steps is kept, because garbage and caches raise the values only
    for a while.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Levels] = {}

    def take(self, event: Batch) -> None:
        self._add(HOST, event.step, event.rss)
        for device in event.devices:
            self._add(device.name, event.step, device.allocated)

    def steady_since(self, name: str) -> int | None:
        """Return the step since which memory is steady; ``None`` if it is not, or if there are too few steps.

        ``name`` is `HOST` or the name of a device.
        """
        series = self._series.get(name)
        return None if series is None else series.steady_since()

    @property
    def devices(self) -> list[str]:
        return [name for name in self._series if name != HOST]

    def _add(self, name: str, step: int, level: int | None) -> None:
        if level is not None:
            self._series.setdefault(name, _Levels()).add(step, level)


class _Levels:
    """Lowest memory in use in each interval of steps; all intervals have the same width."""

    def __init__(self) -> None:
        self._width = 1
        self._lowest: dict[int, int] = {}
        self._last = -1
        self._count = 0

    def add(self, step: int, level: int) -> None:
        self._last = max(self._last, step)
        self._count += 1
        at = step // self._width
        self._lowest[at] = min(level, self._lowest.get(at, level))
        if len(self._lowest) > _MOST:
            self._widen()

    def _widen(self) -> None:
        self._width *= 2
        narrow, self._lowest = self._lowest, {}
        for at, level in narrow.items():
            self._lowest[at // 2] = min(level, self._lowest.get(at // 2, level))

    def steady_since(self) -> int | None:
        if self._count < MIN_STEPS:
            return None
        ordered = sorted(self._lowest.items())
        last = ordered[-1][1]
        tolerance = max(_TOLERANCE * last, _LEAST_TOLERANCE)
        steady: list[int] = []
        for at, level in reversed(ordered):
            if abs(level - last) > tolerance:
                break
            since = at
            steady.append(level)
        step = since * self._width
        least = max(MIN_STEPS, (self._last - ordered[0][0] * self._width) // _LEAST_PART)
        return None if _rises(steady[::-1]) or self._last - step + 1 < least else step


def _rises(levels: list[int]) -> bool:
    third = len(levels) // 3
    if not third:
        return False
    parts = (levels[:third], levels[third:-third], levels[-third:])
    early, middle, late = (median_low(part) for part in parts)
    return min(late - middle, middle - early) > _DRIFT
