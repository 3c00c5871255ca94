"""A detector of growth, and the steps and samples that it takes."""

from collections.abc import Callable
from typing import NamedTuple

from memlog.events import (
    ALLOCATED,
    Batch,
    ChildReading,
    DeviceReading,
    Event,
    HeapReading,
    Inquiry,
    Sample,
)
from memlog.facts.detector import GrowthDetector
from memlog.growth.series import Suspicion
from memlog.leaks.other_causes import TrainersMemory
from memlog.probes.machine import host_free
from memlog.probes.process import read_heap
from support.journals import GIB, MIB, at

NOBODY = 2**22 + 1
"""A process id that no process can have. The memory limits found for it are those of the machine."""


def free() -> int | None:
    return host_free(NOBODY)


class Reports(NamedTuple):
    suspected: list[Suspicion]
    confirmed: list[Suspicion]
    withdrawn: list[Suspicion]


class Judge:
    """The detector, and what the training process adds: it collects garbage and reads the heap."""

    def __init__(self, is_searching: Callable[[], bool], reports: Reports) -> None:
        self.detector = GrowthDetector(free, self._confirmed, self._suspected, self._withdrawn)
        self.is_searching = is_searching
        self._reports = reports
        self._memory = TrainersMemory()
        self._told: set[str] = set()
        self._is_garbage: list[Inquiry] = []
        self._is_ending = False

    def __call__(self, event: Event) -> None:
        self.detector(event)

    def step(self, step: int, anon: float, shared: float = 0, device: float | None = None) -> None:
        """End a step with this memory in MiB. At every step the resident set also grows, by a mapped file."""
        devices = () if device is None else (reading(device),)
        self(Inquiry(at(step), step, "host.anon", self.is_searching()))
        rss = (step + 1) * GIB
        self(Batch(at(step), step, rss, None, None, devices, int(anon * MIB), int(shared * MIB)))
        while self._is_garbage:
            self(self._is_garbage.pop())
        heap = read_heap()
        if heap is not None and "host.anon" in self._told:
            self(HeapReading(at(step), step, heap.in_use, heap.idle))

    def finish(self) -> None:
        self._is_ending = True
        self.detector.finish()

    def _suspected(self, growth: Suspicion) -> None:
        if not self._explained(growth, is_confirmed=False):
            self._told.add(growth.series)
            self._reports.suspected.append(growth)

    def _confirmed(self, growth: Suspicion) -> None:
        if not self._explained(growth, is_confirmed=True):
            self._reports.confirmed.append(growth)

    def _withdrawn(self, growth: Suspicion) -> None:
        self._told.discard(growth.series)
        self._reports.withdrawn.append(growth)

    def _explained(self, growth: Suspicion, *, is_confirmed: bool) -> bool:
        series = "host.anon" if growth.series == "host.free_lists" else growth.series
        if series != "host.anon" and not series.endswith(ALLOCATED):
            return False
        ended = self._is_ending and series in self._told
        found = self._memory.is_garbage(growth, is_confirmed=is_confirmed, has_ended=ended)
        if found:
            self._is_garbage.append(Inquiry(growth.step, growth.step, series, False, (), True))
        return found


def detector(is_searching: Callable[[], bool] = lambda: False) -> tuple[Judge, Reports]:
    reports = Reports([], [], [])
    return Judge(is_searching, reports), reports


def reading(allocated: float) -> DeviceReading:
    return DeviceReading("cuda0", int(allocated * MIB), None, None, None, None)


def sample(step: int, *children: tuple[int, float], shared: float = 0) -> Sample:
    """Return a sample of DataLoader workers. Each child is a process id and MiB."""
    readings = tuple(
        ChildReading(f"DataLoader worker {number}", pid, pid, int(size * MIB))
        for number, (pid, size) in enumerate(children)
    )
    return Sample(at(step), step, GIB, 1, GIB, None, None, None, readings, int(shared * MIB))
