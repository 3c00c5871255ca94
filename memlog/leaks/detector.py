"""Detector of growth: a subscriber that judges every series of the memory readings it receives.

In the training process, the detector judges these series at each step: anonymous memory, shared memory, and
the memory of each device. In the helper process, it judges these series at each `Sample` event: the memory of
each child process, and the shared memory of all child processes together. No series includes mapped files.

Garbage can look like growth of the training process. Before the detector suspects such growth, it collects
young garbage, which has not survived two collections yet. Before it confirms such growth, it collects all
garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic, thread_time
from typing import NamedTuple

from memlog._internal.units import MIB
from memlog.events import Batch, ChildReading, Device, DeviceReading, Event, Sample
from memlog.growth import Growth
from memlog.leaks.forecast import forecast, host_free
from memlog.leaks.gaps import Gaps, StepLevel
from memlog.leaks.process_piles import ProcessPiles, kind_of
from memlog.leaks.series import LARGER, News, SeriesWatch
from memlog.leaks.suspicion import Suspicion
from memlog.leaks.time_budget import seconds_allowed
from memlog.probes.garbage import collect_garbage
from memlog.probes.malloc import Heap, read_heap

HOST_ANON = "host.anon"
FREE_LISTS = "host.free_lists"
SHARED = "shared_memory"
CHILD = "child:"
PILE = "processes:"
ALLOCATED = ".allocated"
FRAGMENTED = ".fragmented"

_HOST_FLOOR = 4 * MIB
"""If memory on the host grows by fewer bytes than this, the growth does not count. The C library takes memory
in pieces of about this size."""
_DEVICE_FLOOR = MIB / 2
_FRAGMENTED_FLOOR = 64 * MIB
"""If a device's fragmented memory grows by fewer bytes than this, the growth does not count. The device's
allocator reserves pieces of 2 to 20 MiB."""
_CHILD_FLOOR = 8 * MIB
"""If a child process grows by fewer bytes than this, the growth does not count. The minimum is larger than
`_HOST_FLOOR`, because fewer readings make the result less certain."""
_STEPS = 24
"""Minimum number of readings before growth is judged, for a series that is read at each step."""
_SAMPLES = 10
"""Minimum number of readings before growth is judged, for a series that the helper process reads. Several
steps lie between two such readings."""
_GARBAGE = 0.25
"""If the collected garbage is less than this fraction of the growth, it is not the growth's cause."""
_COLLECTING = 2.0
"""Maximum processor seconds of the detector's garbage collections; in a long run, 1 % of the run's time.
Beyond the maximum, the detector collects only young garbage."""
_UNUSED = 0.6
"""If the growth of the allocator's unused memory exceeds this fraction of the whole growth, the detector
reports the growth as `FREE_LISTS`."""
_LONG = 64
"""Minimum steps of growth that `GrowthDetector._end_child` counts as long."""

_HEAP_STEPS = 2
"""Number of steps between readings of the heap while growth is suspected. Each reading takes 5 to 500 µs."""
_ALONE = 6
"""Minimum readings of a child process whose growth `GrowthDetector._end_child` counts as long."""

Receiver = Callable[[Suspicion], object]


class _Collected(NamedTuple):
    """Step of the last garbage collection, and bytes in use after the collection."""

    step: int
    left: int


class _DeviceSeries(NamedTuple):
    """Level of one series of a device, in bytes.

    Growth of less than ``floor`` bytes does not count. The device's free memory is its capacity minus
    ``held`` bytes.
    """

    ending: str
    level: int
    floor: float
    held: int


def _device_series(device: DeviceReading) -> Iterator[_DeviceSeries]:
    if device.allocated is None:
        return
    yield _DeviceSeries(ALLOCATED, device.allocated, _DEVICE_FLOOR, device.allocated)
    if device.reserved is not None and device.inactive_split is not None:
        # The smaller figure keeps growing only if both do. Splits of memory that is reserved already do not
        # raise the first figure. Whole free blocks do not raise the second.
        level = min(device.reserved - device.allocated, device.inactive_split)
        yield _DeviceSeries(FRAGMENTED, level, _FRAGMENTED_FLOOR, device.reserved)


def _together(growth: Growth, alike: Sequence[Growth]) -> Growth:
    """Return the sum of ``growth`` and the growths in ``alike``, which belong to other processes."""
    for other in alike:
        growth = growth._replace(
            rate=growth.rate + other.rate,
            low=growth.low + other.low,
            high=growth.high + other.high,
            level=growth.level + other.level,
        )
    return growth


def _suspicion(name: str, growth: Growth, free: float | None, step: int) -> Suspicion:
    return Suspicion(
        series=name,
        since_step=growth.since,
        rate=growth.rate,
        rate_low=growth.low,
        rate_high=growth.high,
        level=int(growth.level),
        limit=None if free is None else int(growth.level + free),
        step=step,
        forecast=forecast(growth, free, step),
    )


class GrowthDetector:
    """Subscriber that reports which series grow.

    Args:
        pid: Process id of the trainer.
        on_confirmed: Function called if growth has lasted. Growth of the training process is reported as
            ``host.free_lists`` if most of it is unused memory of the allocator, otherwise as ``host.anon``.
            Both can be reported, one after the other. Growth of ``host.free_lists`` and of a device's
            fragmented memory can be confirmed several times. Each confirmation calls the function.
        on_suspicion: Function called when a series seems to grow, before the growth is confirmed. The search
            for the cause can then begin.
        on_withdrawn: Function called if the suspected growth has not lasted.
        memory: Function that returns this process's anonymous and shared bytes at the end of the newest step.
            `Batch` events lack these figures, because the journal keeps each step's event small.
        is_searching: Function that returns whether memlog's own search took memory of this process in the
            newest step.
    """

    def __init__(
        self,
        pid: int,
        on_confirmed: Receiver,
        on_suspicion: Receiver = lambda _: None,
        on_withdrawn: Receiver = lambda _: None,
        memory: Callable[[], tuple[int | None, int | None]] = lambda: (None, None),
        is_searching: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pid = pid
        self._memory = memory
        self._is_searching = is_searching
        self._gaps = Gaps()
        self._calls = {
            "suspected": on_suspicion,
            "confirmed": on_confirmed,
            "withdrawn": on_withdrawn,
        }
        self._host = SeriesWatch(_HOST_FLOOR, _STEPS)
        self._host.free = host_free(pid)
        self._watches: dict[str, SeriesWatch] = {HOST_ANON: self._host}
        self._capacities: dict[str, int | None] = {}
        self._children: dict[tuple[int, int], tuple[str, SeriesWatch]] = {}
        self._piles = ProcessPiles(_CHILD_FLOOR, _SAMPLES, self._report_pile)
        self._ended: set[str] = set()
        self._known: dict[str, float] = {}
        self._collected: _Collected | None = None
        self._collecting = 0.0
        self._begun = monotonic()
        self._heap: Heap | None = None
        self._newest_heap: Heap | None = None
        self._suspected = 0
        self._is_ending = False
        self._step = 0

    def __call__(self, event: Event) -> None:
        if type(event) is Batch:
            self._take_batch(event)
        elif type(event) is Sample:
            self._take_sample(event)
        elif type(event) is Device:
            self._capacities[event.name] = event.capacity

    def take_children(self, step: int, children: Sequence[ChildReading]) -> None:
        """Take readings of the child processes. A process without a reading has ended."""
        self._step = step
        alive = {(child.pid, child.started) for child in children}
        for key in [key for key in self._children if key not in alive]:
            self._end_child(*self._children.pop(key))
        for child in children:
            if child.anon is not None:
                known = self._children.get((child.pid, child.started))
                watch = SeriesWatch(_CHILD_FLOOR, _SAMPLES) if known is None else known[1]
                self._children[child.pid, child.started] = (child.role, watch)
                self._report_child(child.role, watch, watch.take(step, child.anon))
        self._piles.take(step, children)

    def finish(self) -> None:
        """Judge all series a last time, and confirm growth that has lasted until the last step.

        Use the figures of the last step, not new ones. After that step, the program's functions have returned
        and can have freed everything.
        """
        self._is_ending = True
        self._take_host(self._gaps.rest())
        suspected = self._host.pending is not None
        news = self._host.end()
        if news is not None:
            self._report_host(news, suspected=suspected)
        for name, watch in self._watches.items():
            if name != HOST_ANON:
                self._report(name, watch, watch.end())
        for role, watch in self._children.values():
            self._end_child(role, watch)
        self._piles.finish()

    def _take_batch(self, event: Batch) -> None:
        self._step = event.step
        anon, shared = self._memory()
        if anon is not None:
            searching = self._is_searching()
            self._take_host(self._gaps.take(event.step, anon, left_out=searching))
            if searching:  # measure the heap's growth from now on, without the search's own memory
                self._heap, self._suspected = read_heap(), event.step
                self._host.in_use.clear()
            elif self._host.pending is not None and event.step % _HEAP_STEPS == 0:
                self._newest_heap = heap = read_heap()
                if heap is not None:
                    self._host.in_use.append((event.step, anon - heap.idle))
        if shared:
            self._take(SHARED, event.step, shared, _HOST_FLOOR, _STEPS)
        for device in event.devices:
            capacity = self._capacities.get(device.name)
            for series in _device_series(device):
                name = device.name + series.ending
                watch = self._take(name, event.step, series.level, series.floor, _STEPS)
                watch.free = None if capacity is None else capacity - series.held

    def _take_host(self, levels: Iterable[StepLevel]) -> None:
        for level in levels:
            news = self._host.take(*level)
            if news is not None:
                self._report_host(news, suspected=news.verdict != "suspected")

    def _take_sample(self, event: Sample) -> None:
        if event.step is None:
            return
        self._step = event.step
        if event.children_shared:
            self._take(SHARED, event.step, event.children_shared, _CHILD_FLOOR, _SAMPLES)
        self.take_children(event.step, event.children)

    def _end_child(self, role: str, watch: SeriesWatch) -> None:
        """Judge a process that has ended.

        A DataLoader's worker can end after one epoch, after only a few readings. So growth is confirmed in
        two cases: it lasted long, or an earlier process of the same role also grew until the end.
        """
        suspected = watch.pending
        news = watch.end()
        grown = news.growth if news and news.verdict == "confirmed" else watch.short_growth()
        if grown is not None:
            again, long = role in self._ended, self._step - grown.since >= _LONG
            self._ended.add(role)
            if again or (long and len(watch.finest.levels) >= _ALONE):
                self._report_child(role, watch, News("confirmed", grown))
                return
        if suspected is not None:
            self._report_child(role, watch, News("withdrawn", suspected))

    def _report_child(self, role: str, watch: SeriesWatch, news: News | None) -> None:
        """Report a child process's growth, unless growth of a process of the same kind was reported before.

        Processes of one kind, such as all workers of a DataLoader, share the cause of growth. Growth that is
        much faster (`LARGER`) than the reported growth gets a new report.
        """
        if news is None:
            return
        kind = kind_of(role)
        rate = news.growth.rate
        if news.verdict != "withdrawn" and rate < LARGER * self._known.get(kind, 0.0):
            return
        if news.verdict == "confirmed":
            self._known[kind] = rate
        others = [other for name, other in self._children.values() if kind_of(name) == kind]
        alike = [other.pending for other in others if other is not watch and other.pending]
        self._report(CHILD + role, watch, news, alike)

    def _report_pile(self, kind: str, watch: SeriesWatch, news: News, count: int) -> None:
        watch.free = host_free(self._pid)
        found = _suspicion(PILE + kind, news.growth, watch.free, self._step)
        self._calls["confirmed"](found._replace(processes=count))

    def _take(self, name: str, step: int, level: int, floor: float, least: int) -> SeriesWatch:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = SeriesWatch(floor, least)
        news = watch.take(step, level)
        if news is not None:
            self._report(name, watch, news)
        return watch

    def _report_host(self, news: News, *, suspected: bool) -> None:
        """Report growth of the training process, unless garbage explains it.

        ``suspected`` is true if the growth has already been reported as suspected.
        """
        is_confirmed = news.verdict == "confirmed"
        if news.verdict != "withdrawn" and self._is_garbage(news.growth, old=is_confirmed):
            self._host.drop()
            if not suspected:
                return
            news = News("withdrawn", news.growth)
        if news.verdict == "suspected":
            self._heap, self._suspected = read_heap(), self._step
        self._report(HOST_ANON, self._host, news)

    def _is_garbage(self, growth: Growth, *, old: bool) -> bool:
        """Collect garbage. Return True if the garbage explains a growth.

        Garbage can hide a leak. If the bytes left after collections grow at least half as fast as ``growth``,
        return False. If ``old`` is true, collect old garbage, too, while time is left (`_COLLECTING`).
        """
        old = old and self._collecting < seconds_allowed(_COLLECTING, self._begun)
        began = thread_time()
        found = collect_garbage(old=old)
        self._collecting += thread_time() - began
        if found is None or found.freed < _GARBAGE * growth.total:
            return False
        before, self._collected = self._collected, _Collected(self._step, found.left)
        if before is None or before.step >= self._step:
            return True
        return (found.left - before.left) / (self._step - before.step) < growth.rate / 2

    def _report(
        self, name: str, watch: SeriesWatch, news: News | None, alike: Sequence[Growth] = ()
    ) -> None:
        if news is None:
            return
        if news.verdict != "withdrawn" and not name.endswith((ALLOCATED, FRAGMENTED)):
            watch.free = host_free(self._pid)
            watch.delay()
        if name == HOST_ANON and news.verdict == "confirmed" and self._is_unused(news.growth.rate):
            name = FREE_LISTS
        if name == FREE_LISTS or (name.endswith(FRAGMENTED) and news.verdict == "confirmed"):
            watch.wait_on(news.growth)
        growth = self._gaps.measured(news.growth) if watch is self._host else news.growth
        found = _suspicion(name, _together(growth, alike), watch.free, self._step)
        self._calls[news.verdict](found._replace(others=len(alike)))

    def _is_unused(self, rate: float) -> bool:
        """Return True if most of the growth since the suspicion is unused memory of the allocator.

        ``rate`` is the growth of the process in bytes per step. The whole growth is the larger of two
        values: ``rate`` times the number of steps, and the growth according to the C library's
        allocator. This allocator does not count the memory that Python manages for small objects.
        """
        before, now = self._heap, self._newest_heap if self._is_ending else read_heap()
        if before is None or now is None:
            return False
        unused, used = now.idle - before.idle, now.in_use - before.in_use
        grown = max(unused + max(used, 0), rate * (self._step - self._suspected))
        return unused > _UNUSED * grown and unused > _HOST_FLOOR / 2
