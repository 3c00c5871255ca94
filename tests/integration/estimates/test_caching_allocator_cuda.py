"""The model of CUDA's caching allocator, beside the real allocator: bytes are equal after each event."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memlog.estimates.caching_allocator import CachingAllocator, OutOfMemoryError

pytestmark = pytest.mark.cuda
MIB = 1024**2
SIZES = st.one_of(
    st.sampled_from([512, 4096, 100_000, MIB, 2 * MIB, 4 * MIB, 10 * MIB, 16 * MIB, 30 * MIB]),
    st.integers(1, MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(MIB, 64 * MIB),
)
EVENTS = st.lists(st.one_of(SIZES, st.floats(0, 1, exclude_max=True)), min_size=60, max_size=160)
"""Sizes of allocations. A fraction frees one of the live blocks."""


@pytest.fixture(scope="module", params=[False, True], ids=["default", "expandable"])
def expandable(request: pytest.FixtureRequest) -> Iterator[bool]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    set_expandable(request.param)
    yield request.param
    torch.cuda.empty_cache()
    set_expandable(False)


def set_expandable(value: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{value}")


def compare(model: CachingAllocator, events: list[float | int]) -> None:
    live: list[tuple[int, int]] = []
    for key, event in enumerate(events):
        if isinstance(event, float):
            if not live:
                continue
            pointer, freed = live.pop(int(event * len(live)))
            torch.cuda.caching_allocator_delete(pointer)
            model.free(freed)
        elif (pointer := allocated(event)) is not None:
            live.append((pointer, key))
            model.allocate(key, event)
        else:
            with pytest.raises(OutOfMemoryError):
                model.allocate(key, event)
        assert model.reserved == torch.cuda.memory_reserved()
        assert model.allocated == torch.cuda.memory_allocated()
    for pointer, _key in live:
        torch.cuda.caching_allocator_delete(pointer)
    torch.cuda.empty_cache()


def allocated(size: int) -> int | None:
    try:
        return int(torch.cuda.caching_allocator_alloc(size, torch.cuda.current_device()))
    except torch.OutOfMemoryError:
        return None


@settings(max_examples=25)
@given(events=EVENTS)
def test_without_a_limit(expandable: bool, events: list[float | int]) -> None:
    compare(CachingAllocator(expandable=expandable), events)


@settings(max_examples=30)
@given(events=EVENTS, limit=st.integers(40 * MIB, 400 * MIB))
def test_with_a_memory_fraction(expandable: bool, events: list[float | int], limit: int) -> None:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    allowed = int(limit / total * total)
    try:
        compare(CachingAllocator(allowed=allowed, expandable=expandable), events)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@settings(max_examples=30)
@given(events=EVENTS, limit=st.integers(40 * MIB, 400 * MIB))
def test_on_a_device_that_is_almost_full(
    expandable: bool, events: list[float | int], limit: int
) -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    taken, size = ctypes.c_void_p(), torch.cuda.mem_get_info()[0] - limit
    assert runtime.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(size)) == 0
    try:
        compare(CachingAllocator(torch.cuda.mem_get_info()[0], expandable=expandable), events)
    finally:
        runtime.cudaFree(taken)


def test_in_real_training(expandable: bool) -> None:
    """The allocator's history has the events of operations, of cuBLAS, and of segments."""
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    try:
        train()
        history: Any = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    model, reserved = CachingAllocator(expandable=expandable), 0
    changes = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    events = 0
    for event in history:
        reserved += changes.get(event["action"], 0) * event["size"]
        if event["action"] == "alloc":
            model.allocate(event["addr"], event["size"])
        elif event["action"] == "free_completed":
            model.free(event["addr"])
        else:
            continue
        events += 1
        assert model.reserved == reserved
    assert events > 1_000
    assert reserved > 100 * MIB


def train() -> None:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(64, 256), encoder, nn.Linear(256, 2_000)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(5):
        out = model(torch.randn(8 + 4 * (step % 3), 128, 64, device="cuda"))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
