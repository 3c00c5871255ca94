"""The probe's decisions, over a stand-in with torch's public surface: no device is here.

``test_probes_cuda.py`` asks the same of a real device, where there is one.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.torch_double import GIB, Devices, Torch, nested

from memlog._internal.diagnostics import Diagnostics
from memlog.events import DeviceReading
from memlog.probes.accelerator import AcceleratorProbe, DeviceFigures, parse_flat, parse_nested
from memlog.probes.machine import shares_host


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def health() -> Diagnostics:
    return Diagnostics()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def probe(health: Diagnostics, clock: Clock) -> AcceleratorProbe:
    return AcceleratorProbe(health, clock=clock)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(torch: Any) -> Any:
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch

    return put


@pytest.mark.parametrize("parse", [parse_nested, parse_flat])
def test_what_the_statistics_lack_is_unknown(parse: Any) -> None:
    assert parse({}) == DeviceFigures(None, None, None, None)


def test_without_torch_there_is_nothing_and_torch_stays_away(
    probe: AcceleratorProbe, health: Diagnostics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert probe.read() == ()
    assert probe.new_devices() == ()
    assert "torch" not in sys.modules
    assert not health.faults


def test_the_real_torch_without_a_device_in_use_gives_no_readings(
    probe: AcceleratorProbe, health: Diagnostics
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("another test has initialised CUDA in this process")

    assert probe.read() == ()
    assert not torch.cuda.is_initialized()
    assert not health.faults


def test_a_device_is_noticed_once_it_is_initialised(use: Any, probe: AcceleratorProbe) -> None:
    cuda = Devices(nested(GIB, 2 * GIB, GIB))
    cuda.initialized = False
    use(Torch(cuda=cuda))
    assert probe.read() == ()
    assert cuda.asked == []

    cuda.initialized = True

    assert [reading.name for reading in probe.read()] == ["cuda0"]


@pytest.mark.seed(203)
def test_reads_statistics_once_for_each_device_in_use(
    use: Any, probe: AcceleratorProbe, health: Diagnostics
) -> None:
    cuda = Devices(nested(GIB, 3 * GIB, 2 * GIB, 7), nested(0, 0, 0), nested(0, GIB, GIB))
    use(Torch(cuda=cuda))

    first, third = probe.read()

    assert first == DeviceReading("cuda0", GIB, 3 * GIB, 2 * GIB, "watermark", 7, None, 0, 0)
    assert (third.name, third.allocated, third.reserved) == ("cuda2", 0, GIB)
    assert cuda.asked == [0, 1, 2]
    probe.read()
    assert cuda.asked == [0, 1, 2, 0, 2]
    assert not health.faults


def test_the_private_function_is_preferred(use: Any, probe: AcceleratorProbe) -> None:
    cuda = Devices(nested(GIB, 3 * GIB, 2 * GIB, 7))
    torch = use(Torch(cuda=cuda))
    (expected,) = probe.read()
    torch._C._cuda_memoryStats = cuda.nested_stats
    cuda.memory_stats = None  # type: ignore[assignment, method-assign]

    # Only this function counts private pools.
    assert probe.read() == (msgspec.structs.replace(expected, private_pools=0),)


def test_peaks_say_how_they_were_obtained(use: Any, probe: AcceleratorProbe) -> None:
    cuda = Devices(nested(10, 50, 30))
    use(Torch(cuda=cuda))
    peaks = []
    for stats in [nested(10, 50, 30), nested(20, 50, 40), nested(20, 50, 40), nested(5, 50, 8)]:
        cuda.stats[0] = stats
        peaks += [(reading.peak, reading.peak_source) for reading in probe.read()]

    assert peaks == [(30, "watermark"), (40, "exact"), (40, "watermark"), (20, "sampled")]


@pytest.mark.parametrize(("selected", "at_once"), [(0, ["cuda0"]), (1, ["cuda0", "cuda1"])])
def test_the_selected_device_is_looked_at_every_time_and_others_every_few_seconds(
    use: Any, probe: AcceleratorProbe, clock: Clock, selected: int, at_once: list[str]
) -> None:
    cuda = Devices(nested(1, 1, 1), nested(0, 0, 0))
    use(Torch(cuda=cuda))
    probe.read()
    cuda.selected = selected
    assert [reading.name for reading in probe.read()] == ["cuda0"]

    cuda.stats[1] = nested(2, 2, 2)

    assert [reading.name for reading in probe.read()] == at_once
    clock.now += 5
    assert [reading.name for reading in probe.read()] == ["cuda0", "cuda1"]


def test_a_device_once_in_use_is_read_when_it_is_empty_again(
    use: Any, probe: AcceleratorProbe
) -> None:
    cuda = Devices(nested(1, 1, 1))
    use(Torch(cuda=cuda))
    probe.read()
    cuda.stats[0] = nested(0, 0, 1)

    assert [reading.allocated for reading in probe.read()] == [0]


def test_new_devices_are_described_once(use: Any, probe: AcceleratorProbe) -> None:
    use(Torch(cuda=Devices(nested(1, 1, 1), nested(2, 2, 2))))
    assert probe.new_devices() == ()
    probe.read()

    described = [
        (d.name, d.product, d.capacity, d.uuid, d.shares_host) for d in probe.new_devices()
    ]

    assert described == [
        ("cuda0", "Thing 0", 80 * GIB, str(UUID(int=0)), False),
        ("cuda1", "Thing 1", 80 * GIB, None, True),  # a torch that does not report its UUID
    ]
    probe.read()
    assert probe.new_devices() == ()


def test_a_device_that_cannot_be_read_is_unknown_and_counted(
    use: Any, probe: AcceleratorProbe, health: Diagnostics
) -> None:
    use(Torch(cuda=Devices(RuntimeError("gone"), nested(2, 2, 2))))

    first, second = probe.read()

    assert first == DeviceReading("cuda0", None, None, None, None, None)
    assert second.allocated == 2
    assert health.faults == {"reading the memory of cuda0: RuntimeError": 1}


def test_a_device_that_cannot_be_described_is_announced_all_the_same(
    use: Any, probe: AcceleratorProbe, health: Diagnostics
) -> None:
    cuda = Devices(nested(1, 1, 1))
    use(Torch(cuda=cuda))
    probe.read()
    cuda.get_device_properties = None  # type: ignore[assignment, method-assign]

    (device,) = probe.new_devices()

    assert (device.name, device.product, device.capacity) == ("cuda0", None, None)
    assert health.faults == {"describing cuda0: TypeError": 1}


def test_an_error_of_one_kind_does_not_affect_the_others(
    use: Any, probe: AcceleratorProbe, health: Diagnostics
) -> None:
    cuda, xpu = Devices(nested(1, 1, 1)), Devices(nested(2, 2, 2))
    cuda.device_count = None  # type: ignore[assignment, method-assign]
    use(Torch(cuda=cuda, xpu=xpu))

    assert [reading.name for reading in probe.read()] == ["xpu0"]
    assert health.faults == {"looking for cuda devices: TypeError": 1}


@pytest.mark.parametrize(
    ("settings", "split"),
    [("", 7), ("expandable_segments:False", 7), ("a:1,expandable_segments:True", None)],
)
def test_expandable_segments_are_not_counted_as_split(
    use: Any, probe: AcceleratorProbe, settings: str, split: int | None
) -> None:
    torch = use(Torch(cuda=Devices(nested(1, 1, 1, 7))))
    torch._C._accelerator_getAllocatorSettings = lambda: settings

    assert [reading.inactive_split for reading in probe.read()] == [split]


def test_the_drivers_own_allocator_does_not_count_splits(use: Any, probe: AcceleratorProbe) -> None:
    torch = use(Torch(cuda=Devices(nested(1, 1, 1, 0))))
    torch.cuda.get_allocator_backend = lambda: "cudaMallocAsync"

    assert [reading.inactive_split for reading in probe.read()] == [None]


def test_mps_is_not_touched_until_a_tensor_lies_there(use: Any, probe: AcceleratorProbe) -> None:
    def untouchable() -> int:
        pytest.fail("would initialise the device")

    mps = SimpleNamespace(
        current_allocated_memory=untouchable,
        driver_allocated_memory=untouchable,
        recommended_max_memory=lambda: 16 * GIB,
    )
    torch = use(Torch(mps=mps))
    probe.notice("cpu")
    assert probe.read() == ()

    mps.current_allocated_memory, mps.driver_allocated_memory = lambda: GIB, lambda: 2 * GIB
    torch.backends.mps.get_name = lambda: "Apple M9"
    probe.notice("mps")

    assert probe.read() == (DeviceReading("mps0", GIB, 2 * GIB, None, None, None),)
    (device,) = probe.new_devices()
    assert (device.name, device.product, device.capacity) == ("mps0", "Apple M9", 16 * GIB)
    assert device.shares_host


def test_other_kinds_come_through_the_accelerator_interface(
    use: Any, probe: AcceleratorProbe, health: Diagnostics
) -> None:
    npu: Any = Devices(nested(1, 2, 3, 1))
    npu.current_accelerator = lambda: SimpleNamespace(type="npu")
    npu.get_memory_info = lambda _index: (GIB, 64 * GIB)
    npu.initialized = False
    use(Torch(npu=npu, accelerator=npu))
    assert probe.read() == ()

    npu.initialized = True

    assert probe.read() == (DeviceReading("npu0", 1, 2, 3, "watermark", 1, None, 0, 0),)
    (device,) = probe.new_devices()
    assert (device.name, device.product, device.capacity) == ("npu0", None, 64 * GIB)
    assert not health.faults


def test_the_accelerator_interface_is_not_asked_on_builds_that_have_their_own_class(
    use: Any, probe: AcceleratorProbe, health: Diagnostics
) -> None:
    accelerator: Any = Devices()
    accelerator.current_accelerator = lambda: pytest.fail("may ask the driver")
    cuda = Devices(nested(1, 1, 1))
    cuda.initialized = False
    use(Torch(cuda=cuda, accelerator=accelerator))

    assert probe.read() == ()
    assert not health.faults


@pytest.mark.seed(30)
def test_nothing_of_memlogs_resets_a_statistic() -> None:
    """The user's peak stays the user's: no code of memlog's even names what resets one."""
    root = Path(__file__).parents[3]
    names = set()
    for folder in ("memlog", "integrations"):
        for file in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    resets = {name for name in names if name.startswith(("reset_peak", "reset_max", "reset_accum"))}
    assert resets | (names & {"empty_cache", "_cuda_resetPeakMemoryStats"}) == set()
    assert "memory_stats" in names  # that what reads is found in this way


def test_integrated_devices_of_amd_may_have_a_part_of_memory_of_their_own() -> None:
    torch = Torch(cuda=Devices(nested(1, 1, 1), nested(2, 2, 2)))
    assert shares_host(torch, "cuda", 1)
    torch.version.hip = "7.0"
    assert not shares_host(torch, "cuda", 1)
    assert not shares_host(torch, "xpu", 0)
