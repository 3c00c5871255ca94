"""Detector of growth: a subscriber that judges every series of the memory readings it receives.

The detector judges these series at each step: anonymous memory and shared memory of the training process, and
the memory of each device. At each `Sample` event, it judges the memory of each child process, and the shared
memory of all child processes together. No series includes mapped files.

Everything is judged from events, so it does not matter which process judges, and when. The helper process
does while the run goes on. A reader of the journal does the same for a run whose helper process has died.
Garbage and the heap can only be read in the training process, which publishes what it reads (`Inquiry`,
`HeapReading`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memlog._internal.terminal import MIB
from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    SHARED,
    Batch,
    ChildReading,
    Device,
    DeviceReading,
    Event,
    HeapReading,
    Inquiry,
    Reading,
    Sample,
    StepInputs,
    readings,
)
from memlog.facts.growth_findings import (
    CHILD,
    CHILDREN_SHARED,
    FRAGMENTED,
    FREE_LISTS,
    OF_DEVICES,
    PILE,
    PRIVATE_POOLS,
    ProcessPiles,
    UntouchedSpace,
    device_series,
    kind_of,
)
from memlog.growth import Growth
from memlog.growth.series import LARGER, Gaps, News, SeriesWatch, StepLevel, Suspicion, forecast

_HOST_FLOOR = 4 * MIB
"""If memory on the host grows by fewer bytes than this, the growth does not count. The C library takes memory
in pieces of about this size."""
CHILD_FLOOR = 8 * MIB
"""If a child process grows by fewer bytes than this, the growth does not count. The minimum is larger than
`_HOST_FLOOR`, because fewer readings make the result less certain."""
_STEPS = 24
"""Minimum number of readings before growth is judged, for a series that is read at each step."""
SAMPLES = 10
"""Minimum number of readings before growth is judged, for a series that the helper process reads. Several
steps lie between two such readings."""
_UNUSED = 0.6
"""If the growth of the allocator's unused memory exceeds this fraction of the whole growth, the detector
reports the growth as `FREE_LISTS`."""
_LONG = 64
"""Minimum steps of growth that `GrowthDetector._end_child` counts as long."""

_ALONE = 6
"""Minimum readings of a child process whose growth `GrowthDetector._end_child` counts as long."""

Receiver = Callable[[Suspicion], object]


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
        free: Function that returns the bytes that the training process can still take; ``None``: unknown.
        on_confirmed: Function called if growth has lasted. Growth of the training process is reported as
            ``host.free_lists`` if most of it is unused memory of the allocator, otherwise as ``host.anon``.
            Both can be reported, one after the other. Growth of ``host.free_lists``, and of a device's
            fragmented memory and private pools, can be confirmed several times. Each confirmation calls the
            function.
        on_suspicion: Function called when a series seems to grow, before the growth is confirmed. The search
            for the cause can then begin.
        on_withdrawn: Function called if the suspected growth has not lasted.
    """

    def __init__(
        self,
        free: Callable[[], int | None],
        on_confirmed: Receiver,
        on_suspicion: Receiver = lambda _: None,
        on_withdrawn: Receiver = lambda _: None,
    ) -> None:
        self._free = free
        self._is_searching = False
        self._gaps = Gaps()
        self._calls = {
            "suspected": on_suspicion,
            "confirmed": on_confirmed,
            "withdrawn": on_withdrawn,
        }
        self._host = SeriesWatch(_HOST_FLOOR, _STEPS)
        self._host.free = free()
        self._watches: dict[str, SeriesWatch] = {HOST_ANON: self._host}
        self._described: dict[str, Device] = {}
        self._most: dict[str, int] = {}
        """For each device, the highest number of bytes that its tensors held at a time so far."""
        self._children: dict[tuple[int, int], tuple[str, SeriesWatch]] = {}
        self._piles = ProcessPiles(CHILD_FLOOR, SAMPLES, self._report_pile)
        self._ended: set[str] = set()
        self._known: dict[str, float] = {}
        self._heap: HeapReading | None = None
        """Heap when growth was suspected, or at the end of the newest search."""
        self._newest_heap: HeapReading | None = None
        self.untouched = UntouchedSpace()
        self._has_suspects: dict[str, bool] = {}
        """For each series, whether its holders are known, and may go on to grow."""
        self._most_elements: dict[str, int] = {}
        """Elements of each input where it was largest, by its name."""
        self._grew_at = -1
        """Newest step in which an input was larger than before."""
        self._anon: int | None = None
        self._suspected = 0
        self._step = 0
        self._available: int | None = None
        """Bytes that the machine could still give at the last sample."""
        self._judged_at: int | None = None

    def __call__(self, event: Event) -> None:
        if type(event) is Batch:
            self.take_step(event.step, readings(event))
        elif type(event) is Sample:
            self._take_sample(event)
        elif type(event) is Inquiry:
            self._is_searching = event.searching
            self._has_suspects[event.series] = bool(event.suspects) and not event.will_fit
            if event.garbage and event.series in self._watches:
                self._watches[event.series].drop()
        elif type(event) is HeapReading:
            self._take_heap(event)
        elif type(event) is StepInputs and event.device == "host":
            # A name that was not there before can be a tensor that the program keeps since then.
            for tensor in event.inputs:
                known = self._most_elements.setdefault(tensor.name, tensor.elements)
                if tensor.elements > known:
                    self._most_elements[tensor.name] = tensor.elements
                    self._grew_at = event.step
        elif type(event) is Device:
            self._described[event.name] = event

    def take_step(self, step: int, found: Iterable[Reading]) -> None:
        """Take the readings of a step. A caller that has them saves the time to make them."""
        self._step, self._anon = step, None
        found = list(found)
        self.untouched.take(step, found)
        for reading in found:
            level = reading.level
            if reading.device is not None:
                if reading.name.endswith(ALLOCATED):
                    self._take_device(step, reading.device)
            elif level is None:
                continue
            elif reading.name == HOST_ANON:
                self._anon = level
                self._take_host(self._gaps.take(step, level, left_out=self._is_searching))
            elif level and reading.name == SHARED:
                self._take(SHARED, step, level, _HOST_FLOOR, _STEPS)

    def have_inputs_grown(self, since: int, until: int) -> bool:
        """Return True if inputs became larger in the second half of the steps from ``since`` to ``until``.

        Larger steps leave larger free blocks in the allocator, and this ends when the inputs stay as they
        are.
        """
        return self._grew_at > since + (until - since) // 2

    def take_children(self, step: int, children: Sequence[ChildReading]) -> None:
        """Take readings of the child processes. A process without a reading has ended."""
        self._step = step
        alive = {(child.pid, child.started) for child in children}
        # A list, because the loop removes entries from the dictionary.
        for key in [key for key in self._children if key not in alive]:
            self._end_child(*self._children.pop(key))
        for child in children:
            if child.anon is not None:
                known = self._children.get((child.pid, child.started))
                watch = SeriesWatch(CHILD_FLOOR, SAMPLES) if known is None else known[1]
                self._children[child.pid, child.started] = (child.role, watch)
                self._report_child(child.role, watch, watch.take(step, child.anon))
        self._piles.take(step, children)

    def finish(self) -> None:
        """Judge all series a last time, and confirm growth that has lasted until the last step.

        Use the figures of the last step, not new ones. After that step, the program's functions have returned
        and can have freed everything. If steps follow, they are judged as before this call. Without new
        steps, a second call changes nothing.
        """
        if self._step == self._judged_at:
            return
        self._judged_at = self._step
        self._take_host(self._gaps.rest())
        for name, watch in self._watches.items():
            self._report(name, watch, watch.end())
        ended = set(self._ended)
        for role, watch in self._children.values():
            self._end_child(role, watch)
        self._ended = ended  # these processes go on
        self._piles.finish()

    def _take_heap(self, event: HeapReading) -> None:
        """Take the heap's figures after the newest step."""
        if event.freed is not None:
            return
        self._newest_heap = event
        if self._is_searching or self._heap is None:
            # Measure the heap's growth from now on, without the search's own memory.
            self._heap, self._suspected = event, event.step
            self._host.in_use.clear()
        elif self._host.pending is not None and self._anon is not None:
            self._host.in_use.append((event.step, self._anon - event.idle))

    def _take_device(self, step: int, device: DeviceReading) -> None:
        described = self._described.get(device.name)
        capacity = None if described is None else described.capacity
        most = max(self._most.get(device.name, 0), device.peak or 0, device.allocated or 0)
        self._most[device.name] = most
        for series in device_series(device, most):
            watch = self._take(
                device.name + series.ending, step, series.level, series.floor, _STEPS
            )
            watch.floor = series.floor
            free = None if capacity is None else capacity - series.held
            # Such a device takes the machine's memory, so what the machine has left limits it, too.
            if described is not None and described.shares_host and self._available is not None:
                free = self._available if free is None else min(free, self._available)
            watch.free = free

    def _take_host(self, levels: Iterable[StepLevel]) -> None:
        for level in levels:
            news = self._host.take(*level)
            if news is not None and news.verdict == "suspected":
                self._heap = self._newest_heap = None
            self._report(HOST_ANON, self._host, news)

    def _take_sample(self, event: Sample) -> None:
        self._available = event.available
        if event.step is None:
            return
        self._step = event.step
        if event.children_shared:
            self._take(CHILDREN_SHARED, event.step, event.children_shared, CHILD_FLOOR, SAMPLES)
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
        watch.free = self._free()
        suspicion = _suspicion(PILE + kind, news.growth, watch.free, self._step)
        self._calls["confirmed"](suspicion._replace(processes=count))

    def _take(self, name: str, step: int, level: int, floor: float, least: int) -> SeriesWatch:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = SeriesWatch(floor, least)
        news = watch.take(step, level)
        self._report(name, watch, news)
        return watch

    def _report(
        self, name: str, watch: SeriesWatch, news: News | None, alike: Sequence[Growth] = ()
    ) -> None:
        if news is None:
            return
        # The free memory of a device is set with its reading (`_take_device`).
        if news.verdict != "withdrawn" and not name.endswith(OF_DEVICES):
            watch.free = self._free()
            watch.delay()
        growth = self._gaps.measured(news.growth) if watch is self._host else news.growth
        if news.verdict == "confirmed" and self._is_filling(name, growth):
            watch.wait_on(news.growth)
            return
        is_host = name == HOST_ANON and news.verdict == "confirmed"
        if is_host and self._is_unused(news.growth.rate):
            if self.have_inputs_grown(growth.since, self._step):
                watch.wait_on(news.growth)
                return
            name = FREE_LISTS
        is_of_allocator = name.endswith((FRAGMENTED, PRIVATE_POOLS))
        # Such growth can be confirmed again, with newer figures.
        if name == FREE_LISTS or (is_of_allocator and news.verdict == "confirmed"):
            watch.wait_on(news.growth)
        suspicion = _suspicion(name, _together(growth, alike), watch.free, self._step)
        device = self._described.get(name.partition(".")[0])
        allocator = None if device is None else device.allocator
        self._calls[news.verdict](suspicion._replace(others=len(alike), allocator=allocator))

    def _is_filling(self, series: str, growth: Growth) -> bool:
        """Return True if the program writes into memory that it has taken before, up to now.

        If containers are known that hold the growth, it is an allocator that takes address space in large
        pieces, as jemalloc does.
        """
        if self._has_suspects.get(series):
            return False
        middle = growth.since + (self._step - growth.since) // 2
        return all(
            self.untouched.is_filled(series, growth.rate, since) for since in (growth.since, middle)
        )

    def _is_unused(self, rate: float) -> bool:
        """Return True if most of the growth since the suspicion is unused memory of the allocator.

        ``rate`` is the growth of the process in bytes per step. The whole growth is the larger of two
        values: ``rate`` times the number of steps, and the growth according to the C library's
        allocator. This allocator does not count the memory that Python manages for small objects.
        """
        before, now = self._heap, self._newest_heap
        if before is None or now is None:
            return False
        unused, used = now.idle - before.idle, now.in_use - before.in_use
        grown = max(unused + max(used, 0), rate * (self._step - self._suspected))
        return unused > _UNUSED * grown and unused > _HOST_FLOOR / 2
