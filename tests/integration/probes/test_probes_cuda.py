"""The probe against torch's own public figures, on a real device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import child

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import MIB
from memlog.probes.accelerator import AcceleratorProbe
from memlog.probes.process import PinnedSizes, read_pinned

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.cuda


@pytest.fixture
def health() -> Diagnostics:
    return Diagnostics()


@pytest.fixture
def probe(health: Diagnostics) -> AcceleratorProbe:
    torch.cuda.init()
    return AcceleratorProbe(health)


def held(size: int) -> Any:
    return torch.ones(size, dtype=torch.uint8, device="cuda:0")


def test_figures_are_torchs_own(probe: AcceleratorProbe, health: Diagnostics) -> None:
    kept, freed = held(64 * MIB), held(200 * MIB)
    del freed

    reading = probe.read()[0]

    assert reading.name == "cuda0"
    assert reading.allocated == torch.cuda.memory_allocated(0) >= kept.nbytes
    assert reading.reserved == torch.cuda.memory_reserved(0)
    assert reading.peak == torch.cuda.max_memory_allocated(0) >= 264 * MIB
    stats = torch.cuda.memory_stats(0)
    assert reading.inactive_split in {stats["inactive_split_bytes.all.current"], None}
    assert not health.faults


def test_every_figure_follows_the_allocator_while_graphs_are_captured_and_dropped(
    probe: AcceleratorProbe, health: Diagnostics
) -> None:
    """Private pools are read only after the allocator took or gave back memory."""
    values, graphs = held(MIB), []
    for step in range(8):
        if step in (2, 3, 6):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                values + values
            graphs.append(graph)
        if step == 5:
            graphs.clear()
            del graph
            torch.cuda.empty_cache()
        (reading,) = probe.read()
        stats = torch._C._cuda_memoryStats(0)
        pools = stats["reserved_bytes_by_private_pools"].values()
        assert reading.private_pools == sum(pool["all"]["current"] for pool in pools)
        assert bool(reading.private_pools) == (step in (2, 3, 4, 6, 7))
        assert reading.reserved == stats["reserved_bytes"]["all"]["current"]
        assert reading.allocated == stats["allocated_bytes"]["all"]["current"]
        assert (reading.retries, reading.ooms) == (stats["num_alloc_retries"], stats["num_ooms"])
    assert not health.faults


def test_failed_allocations_are_counted(probe: AcceleratorProbe) -> None:
    kept = held(MIB)
    (before,) = probe.read()
    with pytest.raises(torch.OutOfMemoryError):
        held(2 * torch.cuda.get_device_properties(0).total_memory)
    (after,) = probe.read()
    assert kept.nbytes == MIB
    assert (after.ooms, after.retries) == (before.ooms + 1, before.retries + 1)


def test_the_device_is_described(probe: AcceleratorProbe) -> None:
    kept = held(MIB)
    probe.read()

    (device,) = probe.new_devices()

    assert kept.nbytes == MIB
    assert device.name == "cuda0"
    assert device.product == torch.cuda.get_device_name(0)
    assert device.capacity == torch.cuda.get_device_properties(0).total_memory
    assert device.allocator == torch._C._accelerator_getAllocatorSettings()


def test_a_peak_inside_the_window_is_exact(probe: AcceleratorProbe) -> None:
    kept = held(MIB)
    torch.cuda.reset_peak_memory_stats(0)
    probe.read()
    passing = held(300 * MIB)
    del passing

    (reading,) = probe.read()

    assert reading.peak_source == "exact"
    assert reading.peak == torch.cuda.max_memory_allocated(0) >= kept.nbytes + 300 * MIB
    assert probe.read()[0].peak_source == "watermark"


def test_a_reset_by_the_user_is_noticed(probe: AcceleratorProbe) -> None:
    passing = held(300 * MIB)
    del passing
    kept = held(MIB)
    probe.read()
    torch.cuda.reset_peak_memory_stats(0)

    (reading,) = probe.read()

    assert reading.peak_source == "sampled"
    assert reading.peak == torch.cuda.memory_allocated(0) >= kept.nbytes


@pytest.mark.seed(30)
def test_reading_never_resets_the_users_peak(probe: AcceleratorProbe) -> None:
    passing = held(300 * MIB)
    del passing
    before = torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0)

    for _ in range(10):
        probe.read()
        probe.new_devices()

    assert (torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0)) == before


PINS = """
    import torch

    from memlog.probes.process import read_pinned

    torch.cuda.init()
    print(*read_pinned())
    block = torch.empty(33 << 20, dtype=torch.uint8, pin_memory=True)
    print(*read_pinned())
    del block
    print(*read_pinned())
"""


@pytest.mark.integration
def test_pinned_blocks_are_powers_of_two_and_are_kept_when_freed(tmp_path: Path) -> None:
    empty, used, freed = pinned(tmp_path)
    assert empty == PinnedSizes(0, 0, 0)
    assert used == PinnedSizes(64 * MIB, 64 * MIB, 64 * MIB)
    assert freed == PinnedSizes(64 * MIB, 0, 64 * MIB)


@pytest.mark.integration
def test_the_advised_setting_neither_rounds_nor_keeps_large_pinned_blocks(tmp_path: Path) -> None:
    _, used, freed = pinned(tmp_path, PYTORCH_ALLOC_CONF="pinned_max_cached_size_mb:32")
    assert used == PinnedSizes(33 * MIB, 33 * MIB, 33 * MIB)
    assert freed == PinnedSizes(0, 0, 33 * MIB)


def pinned(folder: Path, **environment: str) -> list[PinnedSizes]:
    printed = child.run(PINS, folder, fork=False, **environment)
    return [PinnedSizes(*map(int, line.split())) for line in printed.splitlines()]


def test_pinned_memory_is_torchs_own_figure() -> None:
    torch.cuda.init()
    block = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    stats = torch.cuda.host_memory_stats()
    assert read_pinned() == PinnedSizes(
        stats["allocated_bytes.current"],
        stats["active_bytes.current"],
        stats["allocated_bytes.peak"],
    )
    assert block.is_pinned()
