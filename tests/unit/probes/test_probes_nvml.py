"""Memory in use on a whole device, with a library that has NVML's functions and structures.

This needs no GPU. The functions, their arguments and their codes are those of ``nvml.h``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.journals import GIB, MadeRun, at

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.sampler import DevicesInUse, StepFollower
from memlog.events import Batch, Device, DeviceReading, DeviceUse, Sample
from memlog.metrics import values
from memlog.probes.nvml import LIBRARY, Nvml, ProcessUse

NOT_FOUND, UNINITIALIZED = 6, 1
GPU, MIG = "8f6d2b1c-gpu", "0a1b2c3d-mig"


class Library:
    """A driver: total and used bytes by identity, with NVML's prefix."""

    def __init__(self, memory: Mapping[str, tuple[int, int]], initialises: bool = True) -> None:
        self.memory = memory
        self.initialises = initialises
        self.initialised = self.loaded = 0
        self.processes: list[tuple[int, int]] = []
        self._handles = dict(enumerate(memory, start=0x7F00))

    def load(self, name: str) -> "Library":
        assert name == LIBRARY
        self.loaded += 1
        return self

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        self.initialised += 1
        return 0 if self.initialises else UNINITIALIZED

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802 - NVML's name
        assert self.initialised
        for number, known in self._handles.items():
            if known == uuid.decode():
                handle._obj.value = number
                return 0
        return NOT_FOUND

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _: Any, count: Any, found: Any) -> int:  # noqa: N802
        for place, (pid, used) in zip(found, self.processes, strict=False):
            place.pid, place.used = pid, used
        count._obj.value = len(self.processes)
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802 - NVML's name
        total, used = self.memory[self._handles[handle.value]]
        memory._obj.total, memory._obj.used, memory._obj.free = total, used, total - used
        return 0


@pytest.fixture
def health() -> Diagnostics:
    return Diagnostics()


def test_a_gpu_and_a_mig_instance_are_found_by_cudas_identity(health: Diagnostics) -> None:
    library = Library({f"GPU-{GPU}": (81 * GIB, 30 * GIB), f"MIG-{MIG}": (10 * GIB, 4 * GIB)})
    nvml = Nvml(health, library.load)
    assert nvml.read(GPU, 80 * GIB) == 30 * GIB
    assert nvml.read(MIG, 10 * GIB) == 4 * GIB
    assert nvml.read("other", 10 * GIB) is None
    assert (library.loaded, library.initialised) == (1, 1)
    assert not health.faults


def test_a_whole_gpu_is_not_taken_for_a_mig_instance_of_it(health: Diagnostics) -> None:
    nvml = Nvml(health, Library({f"GPU-{GPU}": (81 * GIB, 30 * GIB)}).load)
    assert nvml.read(GPU, 10 * GIB) is None
    assert nvml.read(GPU, None) is None


def test_without_a_driver_nothing_is_read_and_nothing_is_reported(health: Diagnostics) -> None:
    tries = []

    def load(name: str) -> Any:
        tries.append(name)
        raise OSError("cannot open shared object file")

    nvml = Nvml(health, load)
    assert [nvml.read(GPU, GIB) for _ in range(3)] == [None, None, None]
    assert tries == [LIBRARY]
    assert Nvml(health, Library({}, initialises=False).load).read(GPU, GIB) is None
    assert not health.faults


def test_the_real_library_is_asked_with_its_own_types(health: Diagnostics) -> None:
    assert Nvml(health).read(GPU, GIB) is None  # no such device, or no driver
    assert not health.faults


def step(number: int, reserved: int | None) -> Batch:
    reading = DeviceReading("cuda0", GIB, reserved, GIB, "exact", None)
    return Batch(at(number), number, GIB, GIB, "exact", (reading,))


def test_other_users_are_known_while_the_allocators_size_is_steady(
    tmp_path: Path, health: Diagnostics
) -> None:
    nvml = Nvml(health, Library({f"GPU-{GPU}": (81 * GIB, 30 * GIB)}).load)
    run = MadeRun(tmp_path)
    follower = StepFollower(run.directory.files()[0])
    run.write(Device(at(0), "cuda0", "GPU", 80 * GIB, GPU), Device(at(0), "mps0", "M9", GIB))
    found = []
    for number, reserved in enumerate((10 * GIB, 20 * GIB, 20 * GIB, 40 * GIB, 40 * GIB, None)):
        run.write(step(number, reserved))
        follower.look()
        (use,) = follower.devices.read(nvml, 1)
        assert (use.name, use.used) == ("cuda0", 30 * GIB)
        found.append(use.other)
    assert found == [None, None, 10 * GIB, None, None, None]


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([(1, 4 * GIB)], 0),
        ([(1, 4 * GIB), (2, 3 * GIB), (3, 2 * GIB)], 2 * GIB),  # 2 is a descendant of the trainer
        ([(1, 4 * GIB), (3, 2**64 - 1)], None),
        ([(3, 2 * GIB)], None),  # the driver tells ids of the machine outside the container
        ([], None),
    ],
)
def test_other_processes_are_those_outside_the_training(
    health: Diagnostics, processes: list[tuple[int, int]], expected: int | None
) -> None:
    library = Library({f"GPU-{GPU}": (81 * GIB, 30 * GIB)})
    library.processes = processes
    devices = DevicesInUse()
    devices.take(Device(at(0), "cuda0", "GPU", 80 * GIB, GPU))
    (use,) = devices.read(Nvml(health, library.load), 1, [2])
    assert use.other_processes == expected


def test_a_sample_has_all_metrics_of_a_device() -> None:
    use = DeviceUse("cuda0", 30 * GIB, 10 * GIB, 9 * GIB)
    made = Sample(at(1), 3, None, None, None, None, None, devices=(use,))
    assert {value.name: value.value for value in values(made) if value.value is not None} == {
        "memory/cuda0/device_used_mib": 30 * 1024.0,
        "memory/cuda0/other_mib": 10 * 1024.0,
        "memory/cuda0/other_processes_mib": 9 * 1024.0,
    }
    assert DevicesInUse().read(Nvml(Diagnostics()), 1) == ()


def test_processes_of_a_device_with_their_bytes(health: Diagnostics) -> None:
    library = Library({f"GPU-{GPU}": (8 * GIB, GIB)})
    library.processes = [(7, GIB), (8, 2**64 - 1)]
    nvml = Nvml(health, library.load)
    assert nvml.processes(GPU) == [ProcessUse(7, GIB), ProcessUse(8, None)]
    assert nvml.processes("another") == []
    assert not health.faults


def test_an_old_driver_lists_no_processes(health: Diagnostics) -> None:
    class Old(Library):
        nvmlDeviceGetComputeRunningProcesses_v3 = None  # type: ignore[assignment]  # noqa: N815

    nvml = Nvml(health, Old({f"GPU-{GPU}": (8 * GIB, GIB)}).load)
    assert nvml.processes(GPU) == []
    assert not health.faults
