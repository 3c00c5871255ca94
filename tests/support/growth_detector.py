"""A detector of growth, and the steps and samples that it takes."""

from collections.abc import Callable
from typing import NamedTuple

from memlog.events import Batch, ChildReading, DeviceReading, Event, Sample
from memlog.leaks.detector import GrowthDetector
from memlog.leaks.suspicion import Suspicion
from support.journals import GIB, MIB, at

NOBODY = 2**22 + 1
"""A process id that no process can have. The memory limits found for it are those of the machine."""


class Reports(NamedTuple):
    suspected: list[Suspicion]
    confirmed: list[Suspicion]
    withdrawn: list[Suspicion]


class Memory:
    anon = shared = 0


class Judge(NamedTuple):
    detector: GrowthDetector
    memory: Memory

    def __call__(self, event: Event) -> None:
        self.detector(event)

    def step(self, step: int, anon: float, shared: float = 0, device: float | None = None) -> None:
        """End a step with this memory in MiB. At every step the resident set also grows, by a mapped file."""
        self.memory.anon, self.memory.shared = int(anon * MIB), int(shared * MIB)
        devices = () if device is None else (reading(device),)
        self(Batch(at(step), step, (step + 1) * GIB, None, None, devices))

    def finish(self) -> None:
        self.detector.finish()


def detector(is_searching: Callable[[], bool] = lambda: False) -> tuple[Judge, Reports]:
    reports = Reports([], [], [])
    memory = Memory()
    found = GrowthDetector(
        NOBODY,
        reports.confirmed.append,
        reports.suspected.append,
        reports.withdrawn.append,
        lambda: (memory.anon, memory.shared),
        is_searching,
    )
    return Judge(found, memory), reports


def reading(allocated: float) -> DeviceReading:
    return DeviceReading("cuda0", int(allocated * MIB), None, None, None, None)


def sample(step: int, *children: tuple[int, float], shared: float = 0) -> Sample:
    """Return a sample of DataLoader workers. Each child is a process id and MiB."""
    readings = tuple(
        ChildReading(f"DataLoader worker {number}", pid, pid, int(size * MIB))
        for number, (pid, size) in enumerate(children)
    )
    return Sample(at(step), step, GIB, 1, GIB, None, None, None, readings, int(shared * MIB))
