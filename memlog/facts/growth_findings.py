"""Findings about growing series whose precise cause is unknown, and about child processes that pile up.

Fragmented memory is what the allocator reserves beyond the most that tensors ever held at a time, without
private pools. A cache that is as large as the highest peak is used again and again, and steps that become
larger raise that peak. But if the allocator takes more memory although tensors never held more at a time, the
free blocks that it had did not fit. So this measure needs neither `inactive_split`, which is unknown with
expandable segments, nor the blocks themselves. It needs the peak, which is unknown on ``mps``.

The memory of each process is steady, so only the sum over all of them grows. A process counts only while it
is alive. So the sum does not grow if a program replaces its pools or workers by new ones. Memory that forked
processes share does not count.

Memory can rise while the process takes no address space for it: the program writes into a buffer that it has
allocated before, for example into ``np.zeros((100000, 800))``, row after row. This is no leak. The address
space without the memory in it then falls by as much as the memory rises. If the program keeps something new,
both rise, and the difference stays the same, also while memlog's own search takes memory and gives it back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from msgspec.structs import replace

from memlog._internal.terminal import MIB, format_bytes
from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    SHARED,
    ChildReading,
    DeviceReading,
    Event,
    Finding,
    Reading,
    now_us,
)
from memlog.facts.allocator_retries import against_fragmentation
from memlog.growth import Growth
from memlog.growth.lasting import LevelScales
from memlog.growth.series import News, SeriesWatch, Suspicion

FRAGMENTED = ".fragmented"
PRIVATE_POOLS = ".private_pools"
OF_DEVICES = (ALLOCATED, FRAGMENTED, PRIVATE_POOLS)
"""Endings of the names of a device's series."""

_ALLOCATED_FLOOR = MIB / 2
_RESERVED_FLOOR = 64 * MIB
"""If a device's fragmented memory, or its private pools, grow by fewer bytes than this, the growth does not
count. The device's allocator reserves pieces of 2 to 20 MiB."""
_FRAGMENTED_PART = 0.2
"""If a device's fragmented memory grows by less than this fraction of the reserved memory, the growth does
not count. As steps become larger, even an allocator with expandable segments holds some percent more."""


class DeviceSeries(NamedTuple):
    """Level of one series of a device, in bytes.

    Growth of less than ``floor`` bytes does not count. The device's free memory is its capacity minus
    ``held`` bytes.
    """

    ending: str
    level: int
    floor: float
    held: int


def device_series(device: DeviceReading, most: int) -> Iterator[DeviceSeries]:
    """Yield the levels of a device. ``most``: highest number of bytes that its tensors held so far."""
    if device.allocated is None:
        return
    yield DeviceSeries(ALLOCATED, device.allocated, _ALLOCATED_FLOOR, device.allocated)
    if device.reserved is None:
        return
    private = device.private_pools or 0
    if private:
        yield DeviceSeries(PRIVATE_POOLS, private, _RESERVED_FLOOR, device.reserved)
    if device.peak is not None:
        floor = max(_RESERVED_FLOOR, _FRAGMENTED_PART * device.reserved)
        level = max(device.reserved - private - most, 0)
        yield DeviceSeries(FRAGMENTED, level, floor, device.reserved)


FREE_LISTS = "host.free_lists"
CHILD = "child:"
PILE = "processes:"
CHILDREN_SHARED = "children.shared_memory"
_SURE = 100
"""If growth has lasted fewer steps than this, the confidence that memory grows is at most medium."""
_NARROW = 1 / 3
"""Fraction of the rate. If half the width of the rate's 95 % interval is larger, the confidence that memory
grows is at most medium."""
_FRAGMENTS = 400
"""If growth of an allocator's unused memory, or of private pools, has lasted fewer steps than this, memlog
does not report it."""


class _Text(NamedTuple):
    kind: str
    what: str
    """Name of the memory that grows: the beginning of the title."""
    evidence: str
    """Description of how the memory was measured."""
    remedy: str


_TEXTS = {
    HOST_ANON: _Text(
        "growth",
        "The process's memory",
        "Anonymous memory (RssAnon) at step ends, which excludes mapped files and shared memory",
        "Look for what a step keeps: losses or outputs in lists without .detach(), caches, hooks.",
    ),
    FREE_LISTS: _Text(
        "allocator_free_lists",
        "Unused memory of the C library's allocator",
        "Most of the growth is memory that the program has freed and malloc keeps (mallinfo2)",
        "Set MALLOC_ARENA_MAX=2 or MALLOC_TRIM_THRESHOLD_=131072, or preload jemalloc.",
    ),
    SHARED: _Text(
        "shared_memory",
        "Shared memory",
        "Shared memory that the training process maps, at step ends",
        "Copy what you keep of a DataLoader's batches (tensor.clone()), and close shared memory after use.",
    ),
    CHILDREN_SHARED: _Text(
        "shared_memory",
        "Shared memory of child processes",
        "Shared memory that the training's child processes map, as the helper process samples it",
        "Close shared memory after use, and limit what waits in queues between processes.",
    ),
    CHILD: _Text(
        "worker_process",
        "The memory of {}",
        "Anonymous memory of each process, without pages that it shares",
        "Look for what the dataset or collate function keeps from item to item in this process.",
    ),
    PILE: _Text(
        "worker_process",
        "The memory of child processes ({})",
        "Memory that each child process of this kind has alone (Private_Dirty), summed",
        "End each process that you start and wait for it (Popen.communicate, Process.join), or keep a pool.",
    ),
    ALLOCATED: _Text(
        "growth",
        "Memory that tensors hold on {}",
        "Bytes that the allocator has given out, at step ends",
        "Look for tensors that a step keeps: losses, outputs or gradients in lists, without .detach().",
    ),
    FRAGMENTED: _Text(
        "device_fragmentation",
        "Fragmented memory of {}",
        "Bytes that the allocator reserves beyond the most that tensors ever held at a time, without "
        "private pools, at step ends. Free blocks of other sizes did not fit. If the device is full, the "
        "allocator has to give them back first, and a step can run out of memory although tensors need less",
        "",
    ),
    PRIVATE_POOLS: _Text(
        "graph_pools",
        "Memory in private pools of {}",
        "Bytes that the allocator reserves for CUDA graphs and torch.cuda.MemPool alone, at step ends",
        "Capture each graph one time and replay it, drop graphs that you don't replay any more, or let "
        "graphs share a pool (torch.cuda.graph(…, pool=first.pool())).",
    ),
}


class GrowthFindings:
    """Receiver of confirmed growth. It publishes a finding about each growth that is certain enough."""

    def __init__(self, publish: Callable[[Event], object]) -> None:
        self._publish = publish
        self._fragmented: set[str] = set()

    def __call__(self, growth: Suspicion, *, compiles: bool = False) -> None:
        """Publish a finding about a growth, unless the growth is too uncertain.

        If ``compiles`` is true, torch's compiler is in use, and tensors were not watched for this reason.

        For growth of the training process, the confidence must be high.

        Growth of an allocator's unused memory, or of private pools, is published one time, and only after
        `_FRAGMENTS` steps. Even in healthy programs, small free pieces of the heap add up for a while.
        """
        if growth.series == FREE_LISTS or growth.series.endswith((FRAGMENTED, PRIVATE_POOLS)):
            known = growth.series in self._fragmented
            if known or growth.step - growth.since_step < _FRAGMENTS:
                return
            self._fragmented.add(growth.series)
        # Even in healthy programs, allocators take more memory for a while.
        if growth.series != HOST_ANON or confidence_in(growth) == "high":
            finding = finding_of(growth)
            self._publish(_of_compiled_code(finding) if compiles else finding)


def _of_compiled_code(finding: Finding) -> Finding:
    return replace(
        finding,
        evidence=(
            *finding.evidence,
            "Tensors that compiled code (torch.compile) makes were not watched.",
        ),
        remedy="Run some steps with TORCH_COMPILE_DISABLE=1: memlog can then watch the tensors and name what "
        f"keeps them. {finding.remedy}",
    )


def finding_of(growth: Suspicion) -> Finding:
    """Return a finding that reports the growth of a series and names no cause."""
    text, where = _text_of(growth.series)
    others = f", and of {growth.others} more like it," if growth.others else ""
    title = f"{text.what.format(where)}{others} grows"
    if growth.processes is not None:
        begun = f"{growth.processes} child processes ({where}) were started and have not ended"
        title = f"{begun}: their memory grows"
    remedy, forecast, limit = text.remedy, growth.forecast, growth.limit
    if where is not None and growth.series.endswith(FRAGMENTED):
        # Memory does not run out at the forecast step: the allocator can still free its cache then.
        remedy, forecast, limit = against_fragmentation(where, growth.allocator), None, None
    return Finding(
        time_us=now_us(),
        step=growth.step,
        kind=text.kind,
        title=title,
        where=where,
        since_step=growth.since_step,
        rate=growth.rate,
        forecast=forecast,
        limit=limit,
        evidence=(
            text.evidence + ".",
            f"It grew throughout steps {growth.since_step} to {growth.step} and reached "
            f"{format_bytes(growth.level)}.{_interval(growth)}",
        ),
        confidence=confidence_in(growth),
        remedy=remedy,
        memory=memory_in(growth.series),
    )


def _interval(growth: Suspicion) -> str:
    if growth.rate_low <= 0:  # an early sign, which no test has judged
        return ""
    return (
        f" It grew by {format_bytes(growth.rate_low)} to {format_bytes(growth.rate_high)} per step "
        "(95 % confidence)."
    )


def memory_in(series: str) -> str | None:
    """Return ``host`` or the device whose memory a series is; ``None`` for memory of other processes."""
    if series in (HOST_ANON, FREE_LISTS):
        return "host"
    return next((series.removesuffix(end) for end in OF_DEVICES if series.endswith(end)), None)


def _text_of(series: str) -> tuple[_Text, str | None]:
    """Return the texts for a series, and its child process, kind of child processes, or device.

    The second value is ``None`` if the series' name contains none of these.
    """
    if series.startswith(CHILD):
        return _TEXTS[CHILD], series.removeprefix(CHILD)
    if series.startswith(PILE):
        return _TEXTS[PILE], series.removeprefix(PILE)
    for ending in OF_DEVICES:
        if series.endswith(ending):
            return _TEXTS[ending], series.removesuffix(ending)
    return _TEXTS[series], None


def confidence_in(growth: Suspicion) -> Literal["high", "medium", "low"]:
    """Return the confidence that memory grows.

    The confidence depends on the growth's number of steps, and on the width of the rate's 95 % interval.
    """
    long = growth.step - growth.since_step >= _SURE
    narrow = growth.rate_high - growth.rate_low <= 2 * _NARROW * growth.rate
    if long and narrow:
        return "high"
    return "medium" if long or narrow else "low"


_FEWEST = 6
"""Minimum number of processes that were started during the growth and are still alive. If there are fewer,
memlog does not report the growth."""
_ENDED = 0.25
"""Maximum of ``ended / (ended + new)``. Above it, memlog does not report the growth, because processes of
this kind do end. ``ended`` is the number of processes that ended during the growth. ``new`` is the number of
processes that were started during the growth and are still alive."""
_PART = 0.5
"""Minimum of ``new / total``. Below it, memlog does not report the growth. ``new`` is the size of the living
processes that were started during the growth. ``total`` is the size of the growth."""
_TIMES = 4
"""Minimum number of times at which the processes of a short run were started, one time long after another."""
_GOES_ON = 1.5
"""The time since the newest start must not exceed this factor times the longest time between two starts. A
pool that starts its processes when they are first needed is full soon."""
_MULTIPLE = 2
"""More and more processes are started if there are more than this many times as many as at first. Two loaders
have twice as many workers as one."""
_SHORT = 4
"""Multiple of the least number of readings. With fewer, none may be enough to confirm the growth."""
_TWO = 2
"""Minimum number of times at which processes were started."""
_UNJUDGED = 2
"""Number of the newest readings that wait to be judged."""

ProcessKey = tuple[int, int]
"""Process id, and start of the process (Unix time in microseconds)."""
OnNews = Callable[[str, SeriesWatch, News, int], object]
"""Function that takes the kind of processes, the watch over their memory, the new verdict, and the number of
processes."""


def kind_of(role: str) -> str:
    """Return the kind of a process: its role without the number, such as ``DataLoader worker``."""
    return role.rstrip("0123456789 ")


class _Kind:
    def __init__(self, floor: float, least: int) -> None:
        self.watch = SeriesWatch(floor, least)
        self._floor, self._least = floor, least
        self.began: dict[ProcessKey, tuple[int, int]] = {}
        """For each living process, the first step at which it was seen, and its bytes at the newest step."""
        self.ends: list[int] = []
        """For each ended process, the first step at which it was missing."""
        self._newest: list[tuple[int, dict[ProcessKey, int]]] = []

    def take(self, step: int, alive: dict[ProcessKey, int]) -> News | None:
        """Store the bytes of each living process. Judge the third newest reading.

        A program ends its child processes after the program's last step. memlog can't know at once that a
        step was the last one. So the two newest readings are not judged.
        """
        if self._newest and self._newest[-1][0] == step:
            return None
        self._newest.append((step, alive))
        if len(self._newest) <= _UNJUDGED:
            return None
        step, alive = self._newest.pop(0)
        self.ends += [step for key in self.began if key not in alive]
        self.began = {
            key: (self.began[key][0] if key in self.began else step, size)
            for key, size in alive.items()
        }
        return self.watch.take(step, sum(alive.values()))

    def piled_up(self, growth: Growth) -> int:
        """Return the number of processes that make up a growth; 0 if the growth has another cause."""
        new = [size for since, size in self.began.values() if since > growth.since]
        ended = sum(growth.since < step for step in self.ends)
        if len(new) < _FEWEST or ended > _ENDED * (len(new) + ended):
            return 0
        return len(new) if sum(new) >= _PART * growth.total else 0

    def short_growth(self) -> Growth | None:
        """Return the growth of a run with too few readings to test it: none of its processes has ended."""
        starts, last, began = self._goes_on()
        if len(self.watch.finest.levels) >= _SHORT * self._least or len(starts) < _TIMES:
            return None
        self.began = began
        level = sum(size for _, size in began.values())
        total = level - sum(size for since, size in began.values() if since == starts[0])
        rate = total / (last - starts[0])
        # Too few readings for an interval of the rate.
        return (
            Growth(starts[0], rate, 0.0, 2 * rate, level, total) if total >= self._floor else None
        )

    def may_pile_up(self) -> int:
        """Return the number of processes if more and more were started until the end; otherwise 0."""
        starts, _, began = self._goes_on()
        first = sum(since == starts[0] for since, _ in began.values()) if starts else 0
        return len(began) if starts and len(began) > _MULTIPLE * first else 0

    def _goes_on(self) -> tuple[list[int], int, dict[ProcessKey, tuple[int, int]]]:
        """Return the steps at which the living processes began, the newest step, and `began` at this step.

        The result is empty if a process has ended, or no more are started.
        """
        began, last = dict(self.began), 0
        for step, alive in self._newest:
            if began.keys() - alive.keys():
                break  # the program ends them at its end
            began.update({key: (began.get(key, (step, 0))[0], size) for key, size in alive.items()})
            last = step
        starts = sorted({since for since, _ in began.values()})
        if self.ends or len(began) < _FEWEST or len(starts) < _TWO:
            return [], 0, {}
        if last - starts[-1] > _GOES_ON * max(b - a for a, b in pairwise(starts)):
            return [], 0, {}
        return starts, last, began


class ProcessPiles:
    """Watch over the kinds of child processes. ``on_news`` is called when growth is confirmed.

    ``floor`` and ``least`` have the same meanings as in `SeriesWatch`.
    """

    def __init__(self, floor: float, least: int, on_news: OnNews) -> None:
        self._kinds: defaultdict[str, _Kind] = defaultdict(lambda: _Kind(floor, least))
        self._on_news = on_news

    def take(self, step: int, children: Sequence[ChildReading]) -> None:
        sizes: dict[str, dict[ProcessKey, int]] = {kind: {} for kind in self._kinds}
        for child in children:
            key = child.pid, child.started
            if child.own is not None:
                sizes.setdefault(kind_of(child.role), {})[key] = child.own
        for kind, alive in sizes.items():
            self._report(kind, self._kinds[kind].take(step, alive))

    def finish(self) -> None:
        for kind, group in self._kinds.items():
            news = group.watch.end()
            grown = group.short_growth() if news is None else None
            self._report(kind, news if grown is None else News("confirmed", grown))

    def may_pile_up(self) -> tuple[str, int] | None:
        """Return a kind of processes of which more and more were started until the end, and their number."""
        counts = [(kind, group.may_pile_up()) for kind, group in self._kinds.items()]
        most = max(counts, key=lambda counted: counted[1], default=("", 0))
        return most if most[1] else None

    def _report(self, kind: str, news: News | None) -> None:
        if news is None or news.verdict != "confirmed":
            return
        group = self._kinds[kind]
        count = group.piled_up(news.growth)
        if count:
            self._on_news(kind, group.watch, news, count)


_SCALES = 6
"""Number of windows: the longest covers 131,072 steps."""
_FILLED = 0.6
"""Minimum part of a rise that must have filled such space. Meanwhile, the process can take other space that
it does not use at once."""
_JOINED = 3
"""Number of levels at each end of an interval whose medians are compared."""


class UntouchedSpace:
    """Fold of the bytes of address space that are not in use, after each step, in bounded memory."""

    def __init__(self) -> None:
        self._series = {HOST_ANON: LevelScales(_SCALES), SHARED: LevelScales(_SCALES)}

    def take(self, step: int, found: Iterable[Reading]) -> None:
        """Add the readings of a step."""
        for reading in found:
            if reading.space is None or reading.level is None:
                continue
            series = self._series[reading.name]
            if series.finest.indexes and step <= series.finest.indexes[-1]:
                series.clear()  # the program's count of steps has begun again
            series.add(step, reading.space - reading.level)

    def is_filled(self, name: str, rate: float, since: int) -> bool:
        """Return True if a rise of ``rate`` bytes per step since step ``since`` has filled such space.

        ``name`` is ``HOST_ANON`` or ``SHARED``. The result is False if that is not known.
        """
        series = self._series.get(name)
        window = None if series is None else series.covering(since, 2 * _JOINED)
        if window is None:
            return False
        pairs = zip(window.indexes, window.levels, strict=True)
        known = [(step, level) for step, level in pairs if step >= since]
        if len(known) < 2 * _JOINED:
            return False
        # Medians, so that one unusual level at an end does not decide.
        (begin, before), (end, after) = (
            (median(step for step, _ in part), median(level for _, level in part))
            for part in (known[:_JOINED], known[-_JOINED:])
        )
        risen = rate * (end - begin)
        return before - after >= _FILLED * risen > 0
