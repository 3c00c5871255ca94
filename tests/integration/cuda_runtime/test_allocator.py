"""What memlog reads of torch's CUDA allocator, as torch documents it: on a GPU and on simulated devices."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from memlog._internal.terminal import MIB

torch: Any = pytest.importorskip("torch")

pytestmark = [pytest.mark.integration, pytest.mark.cuda]

DEVICE = "cuda:0"
GIB = 1024 * MIB
ROUNDING = 512  # bytes: the smallest block
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB


@pytest.fixture(autouse=True)
def empty_device() -> None:
    """Give back what earlier tests left in the allocator, and begin its peaks and counters anew."""
    torch.cuda.init()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    torch.cuda.reset_accumulated_memory_stats(DEVICE)


def held(size: int, device: str = DEVICE) -> Any:
    return torch.empty(size, dtype=torch.uint8, device=device)


def stat(name: str) -> int:
    return int(torch.cuda.memory_stats(DEVICE)[name])


def nested(name: str) -> dict[str, int]:
    return dict(torch._C._cuda_memoryStats(0)[name]["all"])


@contextlib.contextmanager
def history(**options: Any) -> Iterator[None]:
    torch.cuda.memory._record_memory_history("all", **options)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_small_and_large_tensors_take_rounded_blocks_of_segments() -> None:
    allocated, reserved = stat("allocated_bytes.all.current"), torch.cuda.memory_reserved(DEVICE)
    small, large = held(1000), held(5 * MIB)
    assert (small.nbytes, large.nbytes) == (1000, 5 * MIB)
    assert torch.cuda.memory_allocated(DEVICE) - allocated == 2 * ROUNDING + 5 * MIB
    assert torch.cuda.memory_reserved(DEVICE) - reserved == SMALL_SEGMENT + LARGE_SEGMENT
    requested = stat("requested_bytes.all.current")
    del small
    assert requested - stat("requested_bytes.all.current") == 1000
    assert torch.cuda.memory_reserved(DEVICE) - reserved == SMALL_SEGMENT + LARGE_SEGMENT  # cached
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) - reserved == LARGE_SEGMENT
    assert stat("inactive_split_bytes.all.current") >= LARGE_SEGMENT - 5 * MIB


def test_the_nested_statistics_are_the_flat_ones() -> None:
    kept = held(MIB)
    for name in ("allocated_bytes", "reserved_bytes", "requested_bytes", "inactive_split_bytes"):
        flat = {of: stat(f"{name}.all.{of}") for of in ("current", "peak", "allocated", "freed")}
        assert nested(name) == flat
    assert nested("allocated_bytes")["current"] >= kept.nbytes
    for counter in ("num_alloc_retries", "num_ooms"):
        assert torch._C._cuda_memoryStats(0)[counter] == stat(counter) == 0


def test_peaks_fall_to_the_level_when_reset() -> None:
    kept, passing = held(MIB), held(64 * MIB)
    del passing
    level, peak = nested("allocated_bytes")["current"], nested("allocated_bytes")["peak"]
    assert peak - level == 64 * MIB
    assert torch.cuda.max_memory_allocated(DEVICE) == peak
    torch.cuda.reset_peak_memory_stats(DEVICE)
    assert nested("allocated_bytes")["peak"] == level >= kept.nbytes


def test_what_is_free_on_the_device_falls_by_what_is_reserved() -> None:
    free, total = torch.cuda.mem_get_info(DEVICE)
    kept = held(100 * MIB)
    assert torch.cuda.mem_get_info(DEVICE) == (free - kept.nbytes, total)
    assert torch.cuda.get_device_properties(0).total_memory == total


def test_the_cache_is_given_back_before_memory_runs_out_and_each_failure_is_counted() -> None:
    failures: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *values: failures.append(values))
    free, total = torch.cuda.mem_get_info(DEVICE)
    cached = held(free // 2)
    del cached
    large = held(free // 4 * 3)
    assert (stat("num_alloc_retries"), stat("num_ooms"), failures) == (1, 0, [])

    with pytest.raises(torch.OutOfMemoryError) as raised:
        held(free // 2)

    assert (stat("num_alloc_retries"), stat("num_ooms")) == (2, 1)
    ((device, requested, capacity, unused),) = failures
    assert (device, requested, capacity) == (0, free // 2, total)
    assert unused == torch.cuda.mem_get_info(DEVICE)[0]
    assert large.nbytes
    text = str(raised.value)
    assert text.startswith(f"CUDA out of memory. Tried to allocate {free / 2 / GIB:.2f} GiB. GPU 0")
    assert f"total capacity of {total / GIB:.2f} GiB" in text
    assert "this process has" in text
    assert "is reserved by PyTorch but unallocated" in text


def test_a_fraction_of_the_device_is_a_limit_and_the_message_names_it() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.1)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            held(total // 5)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert f"{total / 10 / GIB:.2f} GiB allowed" in str(raised.value)
    assert held(total // 5).nbytes == total // 5


def test_the_snapshot_has_segments_with_blocks_and_the_settings() -> None:
    kept = held(5 * MIB)
    snapshot = torch.cuda.memory._snapshot()
    assert {"segments", "device_traces", "allocator_settings"} <= set(snapshot)
    assert snapshot["allocator_settings"]["expandable_segments"] is False
    (segment,) = [one for one in snapshot["segments"] if _holds(one, kept.data_ptr())]
    known = ("device", "segment_type", "total_size", "segment_pool_id", "is_expandable", "stream")
    assert [segment[key] for key in known] == [0, "large", LARGE_SEGMENT, (0, 0), False, 0]
    states = [(block["state"], block["size"]) for block in segment["blocks"]]
    assert states == [("active_allocated", 5 * MIB), ("inactive", LARGE_SEGMENT - 5 * MIB)]
    without = torch.cuda.memory.memory_snapshot(include_traces=False)
    assert [one["address"] for one in without] == [one["address"] for one in snapshot["segments"]]


def _holds(segment: dict[str, Any], address: int) -> bool:
    return 0 <= address - segment["address"] < segment["total_size"]


def test_the_history_has_each_allocation_with_its_clock_note_and_lines() -> None:
    before = time.time_ns() // 1000
    with history(stacks="python", max_entries=100, clear_history=True):
        torch.cuda.memory._set_memory_metadata("a note")
        kept = held(30 * MIB)
        address = kept.data_ptr()
        del kept
        torch.cuda.memory._set_memory_metadata("")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    own = [entry for entry in trace if entry["addr"] == address]
    actions = ["segment_alloc", "alloc", "free_requested", "free_completed"]
    assert sorted(entry["action"] for entry in own) == sorted(actions)
    assert {entry["size"] for entry in own} == {30 * MIB}
    assert [entry["user_metadata"] for entry in own] == ["a note"] * 4
    times = [entry["time_us"] for entry in own]
    assert times == sorted(times)
    assert before <= times[0] <= time.time_ns() // 1000
    (allocation,) = [entry for entry in own if entry["action"] == "alloc"]
    assert any(frame["filename"] == __file__ for frame in allocation["frames"])
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_full_history_keeps_the_newest_entries() -> None:
    with history(context=None, max_entries=10, clear_history=True):
        for size in range(1, 21):
            held(size * ROUNDING)
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [entry["size"] for entry in trace if entry["action"] == "alloc"][-1] == 20 * ROUNDING
    assert len(trace) == 10


def test_pools_are_named_in_segments_and_entries() -> None:
    pool = torch.cuda.MemPool()
    with history(context=None, clear_history=True), torch.cuda.use_mem_pool(pool):
        kept = held(5 * MIB)
        snapshot = torch.cuda.memory._snapshot()
    (segment,) = [one for one in snapshot["segments"] if _holds(one, kept.data_ptr())]
    assert segment["segment_pool_id"] == pool.id != (0, 0)
    (entry,) = [one for one in snapshot["device_traces"][0] if one["action"] == "alloc"]
    assert entry["pool_id"] == pool.id


def test_a_graphs_memory_is_in_its_own_pool_also_that_of_a_stream_beside_it() -> None:
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        tensors = [held(3 * MIB)]
        assert torch.cuda.is_current_stream_capturing()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            assert torch.cuda.is_current_stream_capturing()
            tensors.append(held(3 * MIB))
        torch.cuda.current_stream().wait_stream(beside)
    assert not torch.cuda.is_current_stream_capturing()
    segments = torch.cuda.memory_snapshot()
    pools = {
        one["segment_pool_id"]
        for one in segments
        if any(_holds(one, tensor.data_ptr()) for tensor in tensors)
    }
    assert pools == {graph.pool()}
    graph.replay()
    del tensors
    graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) == 0


def test_pinned_memory_is_counted_apart() -> None:
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    assert pinned.is_pinned()
    after = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert after - before == 4 * MIB  # a power of two


def test_the_backend_has_a_name() -> None:
    assert torch.cuda.get_allocator_backend() == "native"
