"""Memory in use after each step, the evidence that it does not grow, and the run's peaks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from memlog._internal.terminal import MIB, format_bytes
from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    HOST_PEAKS,
    HOST_RSS,
    OTHER_PROCESSES,
    RESERVED,
    TREE,
    Batch,
    Evaluation,
    Event,
    Finding,
    PeakSource,
    Phase,
    Reading,
    Trace,
)
from memlog.growth.evidence import FEWEST_LEVELS, Evidence, evidence, longest_pause

_MOST = 512
"""Maximum number of intervals of a series. If there are more, every two neighbours become one interval."""
_ALIKE = 3
"""Number of neighboring intervals whose lowest level is the level there, for a rate."""
_HEAPS = 4
"""Number of readings of the heap in a row that must rise, before the heap rises."""
_APART = 1.25
"""Minimum ratio of a heap reading's step to that of the reading before, counted from the first one."""
_EVENLY = 0.5
"""Minimum ratio of the heap's rate of growth between two readings to its rate between all of them."""
_HOST_FLOOR = 4 * MIB
_DEVICE_FLOOR = MIB / 2
"""Smaller rises of a device's memory, and than `_HOST_FLOOR` of the process's memory, are no growth.
Allocators take memory in pieces of about this size."""
_FAR_MORE = 4
"""Factor. Growth has ended if it would have been seen this many times over."""
_CAN_BE_FULL = (
    "kept_tensors",
    "growing_container",
    "model_copies",
    "python_memory",
    "native_library",
    "allocator_free_lists",
    "growth",
)
"""Kinds of findings that can be a cache until it is full, the best few checkpoints, or a warm-up. The others
are faults also if the growth has ended, such as outputs that keep their graphs."""
_FEWEST_STEADY = 64
"""Fewer steady steps than this can be a pause: growth is confirmed after 64 steps or more."""
_LAST_PART = 3
"""Memory must be steady for this part of the time since the growth began: 3 means a third."""
_PAUSES = 3
"""Memory must be steady for this number of times the longest pause in the growth."""
HOST = "host"


class LevelFold:
    """Memory in use after the steps: that of the process, and that of each device.

    The process's memory is its anonymous memory, which leaves out mapped files; if unknown, its resident set.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Levels] = {}
        self._knows_anon = False
        self._heap: list[tuple[int, int]] = []
        """Steps, and the bytes that the C library's allocator had given out after them."""

    def take(self, step: int, readings: list[Reading]) -> None:
        """Add the readings of a step."""
        for reading in readings:
            name, level = reading.name, reading.level
            if level is None:
                continue
            if name == HOST_ANON:
                self._knows_anon = True
                self.add(HOST, step, level)
            elif name == HOST_RSS and not self._knows_anon and readings[1].level is None:
                self.add(HOST, step, level)
            elif name.endswith(ALLOCATED):
                self.add(reading.owner, step, level)

    def take_search(self, *, goes_on: bool) -> None:
        """Note whether memlog's own search takes memory in the steps that follow."""
        host = self._series.get(HOST)
        if host is not None:
            host.take_search(goes_on=goes_on)

    def take_heap(self, step: int, in_use: int) -> None:
        """Add a reading of the bytes that the C library's allocator has given out.

        They are read rarely. While growth is examined, they are read often; then most readings are left out.
        """
        first, last = (self._heap[0][0], self._heap[-1][0]) if self._heap else (step, step)
        if step < last:
            self._heap.clear()  # the program's count of steps has begun again
        elif self._heap and step - first < _APART * (last - first) + 1:
            return
        self._heap.append((step, in_use))

    def add(self, name: str, step: int, level: int) -> None:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Levels()
        series.add(step, level)

    def evidence(self, name: str) -> Evidence | None:
        """Return what is known about the growth of ``host`` or a device; ``None``: too few steps."""
        series = self._series.get(name)
        floor = _HOST_FLOOR if name == HOST else _DEVICE_FLOOR
        known = None if series is None else series.evidence(floor)
        if name != HOST or known is None or known.since is None:
            return known
        return self._rise_inside(known.since) or known

    def _rise_inside(self, since: int) -> Evidence | None:
        """Return the rise of what the program has allocated while the process's memory is steady.

        Blocks that a program has freed can remain in the process, above all small ones. What it then keeps
        takes their place, and the process does not grow until they are used up. ``None``: there is no such
        rise since step ``since``, or the heap was read too rarely.
        """
        readings = [reading for reading in self._heap if reading[0] >= since][-_HEAPS:]
        rates = [(b - a) / (after - before) for (before, a), (after, b) in pairwise(readings)]
        if len(readings) < _HEAPS:
            return None
        steps, rise = (b - a for a, b in zip(readings[0], readings[-1], strict=True))
        if rise <= _HOST_FLOOR or min(rates) < _EVENLY * rise / steps:
            return None
        return Evidence(None, steps, 0.0, 0.0, rise, is_inside=True)

    def steady_since(self, finding: Finding) -> int | None:
        """Return the step at which a finding's growth had ended; ``None``: it goes on, or that is unknown.

        It has ended if memory is steady since, and at the finding's rate would have risen far more than that
        excludes.
        """
        known = self._after(finding)
        return None if known is None else known.since

    def is_full(self, finding: Finding) -> bool:
        """Return True if a finding's growth was that of a cache that is full by now, as far as levels tell.

        The growth has ended, and memory has been steady since then for `_FEWEST_STEADY` steps, for a third of
        the time since the growth began, and for three times the longest pause in the growth.
        """
        known = self._after(finding)
        if known is None or known.since is None or finding.kind not in _CAN_BE_FULL:
            return False
        begin = finding.since_step or 0
        pause = self._series[finding.memory or HOST].longest_pause(begin, known.since)
        wanted = max(
            _FEWEST_STEADY, (known.since - begin + known.steps) / _LAST_PART, _PAUSES * pause
        )
        return known.steps >= wanted

    def _after(self, finding: Finding) -> Evidence | None:
        """Return the evidence that a finding's growth has ended; ``None``: there is none."""
        # The levels are this rank's.
        if finding.memory is None or finding.rank is not None or not finding.rate:
            return None
        known = None if finding.kind == "larger_steps" else self.evidence(finding.memory)
        if known is None or known.since is None or known.since <= (finding.since_step or 0):
            return None
        return known if finding.rate * known.steps > _FAR_MORE * known.excluded else None

    def rate_since(self, name: str, step: int) -> float | None:
        """Return by how many bytes per step ``host`` or a device has risen since a step.

        ``None``: it has not risen, or there are too few steps since.
        """
        series = self._series.get(name)
        return None if series is None else series.rate_since(step)

    def rise_of_few(self) -> tuple[str, int, int] | None:
        """Return a series with too few levels for `evidence`: its name, its number of levels, and its rise.

        The rise is 0 if it is below the floor. The series is the one that rises most. ``None``: there is
        none, or one has enough levels.
        """
        if not all(series.is_short for series in self._series.values()):
            return None
        few = [
            (name, *series.few(_HOST_FLOOR if name == HOST else _DEVICE_FLOOR))
            for name, series in self._series.items()
        ]
        return max(few, key=lambda candidate: candidate[2], default=None)

    @property
    def devices(self) -> list[str]:
        return [name for name in self._series if name != HOST]


def unsteady(levels: LevelFold) -> tuple[str, Evidence] | None:
    """Return a series that is not steady, with what is known about it; ``None``: all are steady.

    If several are not steady, it is the one that rises most.
    """
    known = [(name, levels.evidence(name)) for name in (HOST, *levels.devices)]
    varying = [
        (name, judged) for name, judged in known if judged is not None and judged.since is None
    ]
    return max(varying, key=lambda pair: pair[1].rise, default=None)


def doubt(owner: str, known: Evidence, levels: LevelFold) -> str:
    """Return what speaks against an all-clear, without a full stop."""
    memory = memory_of(owner, levels)
    if known.is_inside:
        return (
            f"memory is steady, but what the program has allocated rose by {format_bytes(known.rise)} in "
            f"{known.steps:,} steps, inside memory that it had freed before"
        )
    if known.rise:
        return f"{memory} rose by {format_bytes(known.rise)} in {known.steps:,} steps"
    return f"{memory} varied too much in {known.steps:,} steps to exclude growth"


def memory_of(owner: str, levels: LevelFold) -> str:
    """Return the name of a series in a sentence. Beside a device, the host is named."""
    if owner == HOST:
        return "host memory" if levels.devices else "memory"
    return f"memory on {owner}"


class _Levels:
    """Lowest memory in use in each interval of steps; all intervals have the same width."""

    def __init__(self) -> None:
        self._width = 1
        self._lowest: dict[int, int] = {}
        self._steps = self._last = self._newest = 0
        self._before_search: int | None = None
        """Level before a search that goes on; ``None``: none does."""
        self._left = self._after_search = self._highest = 0
        """Bytes that the newest search may have left free, the level at its end, and its highest level."""

    def take_search(self, *, goes_on: bool) -> None:
        if goes_on and self._before_search is None:
            self._before_search = self._highest = self._newest
        elif not goes_on and self._before_search is not None:
            self._left, self._after_search = self._highest - self._before_search, self._newest
            self._before_search = None

    def add(self, step: int, level: int) -> None:
        self._steps += 1
        self._last, self._newest = step, level
        self._highest = max(self._highest, level)
        at = step // self._width
        known = self._lowest.get(at)
        if known is None or level < known:
            self._lowest[at] = level
            if len(self._lowest) > _MOST:
                self._widen()

    def _widen(self) -> None:
        self._width *= 2
        narrow, self._lowest = self._lowest, {}
        for at, level in narrow.items():
            self._lowest[at // 2] = min(level, self._lowest.get(at // 2, level))

    @property
    def is_short(self) -> bool:
        return self._steps < FEWEST_LEVELS or len(self._lowest) < FEWEST_LEVELS

    def few(self, floor: float) -> tuple[int, int]:
        """Return the number of levels, and their rise; 0 if it is below the floor."""
        rise = self._lowest[max(self._lowest)] - self._lowest[min(self._lowest)]
        return self._steps, rise if rise > floor else 0

    def rate_since(self, step: int) -> float | None:
        since = [at for at in sorted(self._lowest) if at >= step // self._width]
        if len(since) < FEWEST_LEVELS:
            return None
        # The lowest of a few levels leaves out peaks. In memory that rises, it is the first of them.
        first, last = since[:_ALIKE], since[-_ALIKE:]
        rise = min(self._lowest[at] for at in last) - min(self._lowest[at] for at in first)
        return rise / ((last[0] - first[0]) * self._width) if rise > 0 else None

    def longest_pause(self, begin: int, end: int) -> int:
        """Return the longest time without a new high between two steps; the whole time if levels are few."""
        within = [at for at in sorted(self._lowest) if begin <= at * self._width <= end]
        if len(within) < FEWEST_LEVELS:
            return end - begin
        steps = [at * self._width for at in within]
        return longest_pause(steps, [float(self._lowest[at]) for at in within])

    def evidence(self, floor: float) -> Evidence | None:
        if self.is_short:
            return None
        ordered = sorted(self._lowest.items())
        indexes = [at * self._width for at, _ in ordered]
        left, after = self._left, self._after_search
        if self._before_search is not None:
            left, after = self._highest - self._before_search, self._highest
        hidden = max(left - max(self._newest - after, 0), 0)
        known = evidence(indexes, [float(level) for _, level in ordered], floor, hidden)
        first = indexes[0] if known.since is None else known.since
        return known._replace(steps=self._last - first + 1)


_TRUST: dict[PeakSource | None, int] = {None: 0, "sampled": 1, "watermark": 2, "exact": 3}
"""Priority of a reading's source. Of equal readings, only the reading with the highest priority is kept."""


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The highest value of one kind of memory over the run."""

    bytes: int | None
    """The highest value; ``None``: nothing could be read."""
    source: PeakSource | None
    """How it was obtained: exactly; from the process's own high-water mark, which may be older than the run,
    so an upper bound; or by samples, so a lower bound."""
    step: int | None
    """Last step that was complete when the peak was read; ``None`` if the peak was not read at a step."""
    evaluation: int | None
    """Number of the evaluation (call of a loss function) at which the peak was read; ``None``: none."""
    after_step: bool = False
    """True if the peak was read after ``step``, as a phase of the program ended."""

    @property
    def at_step(self) -> str:
        """Return ``at step 5`` or ``after step 5``; empty if the peak was not read at a step."""
        preposition = "after" if self.after_step else "at"
        return "" if self.step is None else f"{preposition} step {self.step:,}"

    @property
    def place(self) -> str:
        """Return where in the run the peak was read, such as ``step 5``; empty if that is unknown."""
        if self.step is not None:
            return self.at_step.removeprefix("at ")
        return "" if self.evaluation is None else f"evaluation {self.evaluation:,}"


UNKNOWN = Peak(bytes=None, source=None, step=None, evaluation=None)


def peak_kind(name: str) -> str:
    """Return the kind of memory that is shown as the peak of ``name``, such as ``cuda0.allocated``."""
    return HOST_RSS if name == "host" else name + ALLOCATED


class PeakFold:
    """The highest value of each kind of memory, with its source and its step.

    A kind is one of `HOST_PEAKS`, or a device's: ``<device>.allocated``, ``<device>.reserved`` or
    ``<device>.other_processes``.
    """

    def __init__(self) -> None:
        self._peaks = {HOST_RSS: UNKNOWN, TREE: UNKNOWN}
        self._has_steps = False

    def expect(self, device: str) -> None:
        """Add a device's missing kinds of memory, ``allocated`` and ``reserved``, with unknown peaks."""
        for kind in (device + ALLOCATED, device + RESERVED):
            self._peaks.setdefault(kind, UNKNOWN)

    def take(self, event: Event, found: Iterable[Reading]) -> None:
        """Add the readings of one event. If sizes are equal, the `_TRUST` of the source decides."""
        self._has_steps = self._has_steps or isinstance(event, Batch)
        after = self._has_steps and isinstance(event, Phase)
        for reading in found:
            name = reading.name
            if reading.device is None and not (
                name in HOST_PEAKS or name.endswith(OTHER_PROCESSES)
            ):
                continue
            size, source = reading.highest
            if size is None:
                continue
            peak = self._peaks.get(name, UNKNOWN)
            # Most readings are no new peak, and this check is faster than the one below.
            if peak.bytes is not None and size < peak.bytes:
                continue
            if peak.bytes is None or (size, _TRUST[source]) > (peak.bytes, _TRUST[peak.source]):
                at = event.evaluation if isinstance(event, Evaluation) else None
                step = None if at is not None else getattr(event, "step", None)
                self._peaks[name] = Peak(
                    bytes=size, source=source, step=step, evaluation=at, after_step=after
                )

    def of(self, kind: str, otherwise: Peak) -> Peak:
        return self._peaks.get(kind, otherwise)

    def summary(self) -> dict[str, Peak]:
        return dict(sorted(self._peaks.items()))


WORSE = 1.01
"""Factor. A step replaces the worst step if the step's peak exceeds the worst peak times the factor. But if
the worst step is the first traced step, the limit is the worst peak divided by the factor."""


class TraceFold:
    """Number of traced steps, the worst of them, and the newest.

    The worst step is the one whose allocations the run's folder has (`Trace.kept`). If the journal does not
    tell that, it is the step with the highest peak. An exact peak takes precedence over a peak that is not
    exact. The first traced step can lack the optimizer's state. So a later step replaces the first traced
    step even if the later step's peak is slightly lower.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.worst: Trace | None = None
        self.newest: Trace | None = None
        self._worst_is_first = False

    def take(self, event: Trace) -> None:
        self.steps += 1
        self.newest = event
        if event.peak is not None and self._is_worse(event, event.peak):
            self._worst_is_first = self.worst is None
            self.worst = event

    def _is_worse(self, event: Trace, peak: int) -> bool:
        worst = self.worst
        if event.kept is not None:
            return event.kept or worst is None
        if worst is None or event.exact != worst.exact:
            return worst is None or event.exact
        most = worst.peak or 0
        return peak > (most / WORSE if self._worst_is_first else most * WORSE)


def among(steps: int) -> str:
    return "the only step that was traced" if steps == 1 else f"the worst of {steps:,} traced steps"
