"""The model of CUDA's caching allocator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlog.estimates.caching_allocator import CachingAllocator, OutOfMemoryError

MIB = 1024**2


def allocated(*sizes: int, limit: int | None = None, expandable: bool = False) -> CachingAllocator:
    allocator = CachingAllocator(limit, expandable=expandable)
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
    return allocator


def in_use(allocator: CachingAllocator) -> int:
    return sum(block.size for block in allocator._used.values())


def test_it_reserves_what_a_published_snapshot_shows() -> None:
    """discuss.pytorch.org/t/178671: ``X @ W + b``, with the workspace of cuBLAS in a segment of its own."""
    allocator = allocated(40_000, 40, 4_000, 40, 40)
    allocator.free(3)  # the product is freed when the sum exists
    assert (allocator.reserved, in_use(allocator)) == (2_097_152, 45_568)
    allocator.allocate(5, 8_519_680)
    assert allocator.reserved == 2_097_152 + 20_971_520


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_have_the_sizes_of_the_source(size: int, reserved: int) -> None:
    assert allocated(size).reserved == reserved


def test_what_is_freed_is_used_again_and_a_rest_of_one_mib_is_not_split_off() -> None:
    allocator = allocated(30 * MIB)
    allocator.free(0)
    allocator.allocate(1, 29 * MIB)
    assert allocator.reserved == in_use(allocator) == 30 * MIB


def test_unused_segments_are_given_back_at_the_limit() -> None:
    allocator = allocated(30 * MIB, limit=50 * MIB)
    allocator.free(0)
    allocator.allocate(1, 40 * MIB)
    assert allocator.reserved == 40 * MIB


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(OutOfMemoryError):
        allocated(30 * MIB, 30 * MIB, limit=50 * MIB)


def test_fragmentation_makes_a_job_fail_that_expandable_segments_would_save() -> None:
    def fragmented(*, expandable: bool) -> CachingAllocator:
        allocator = allocated(*[24 * MIB] * 4, limit=120 * MIB, expandable=expandable)
        allocator.free(1)
        allocator.free(2)
        allocator.allocate(9, 44 * MIB)
        return allocator

    with pytest.raises(OutOfMemoryError):
        fragmented(expandable=False).allocate(10, 44 * MIB)
    assert fragmented(expandable=True).reserved <= 120 * MIB


def test_the_end_of_an_expandable_segment_is_used_last() -> None:
    allocator = allocated(17 * MIB, 4 * MIB, 16 * MIB, expandable=True)
    allocator.free(0)  # 17 MiB at the begin; at the end, 3 MiB are free and can grow
    allocator.allocate(3, 2 * MIB)
    allocator.allocate(4, 23 * MIB)
    assert allocator.reserved == 60 * MIB  # 3 MiB were free at the end, so one page is enough


def test_free_pages_within_an_expandable_segment_are_given_back_and_filled_again() -> None:
    allocator = allocated(20 * MIB, 40 * MIB, 20 * MIB, limit=100 * MIB, expandable=True)
    allocator.free(1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(3, 70 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(4, 30 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.allocate(5, 9 * MIB)
    assert allocator.reserved == 80 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 5)), max_size=60), st.booleans())
def test_it_holds_all_that_is_allocated_and_no_more_than_it_reserves(
    calls: list[tuple[int, int]], expandable: bool
) -> None:
    allocator, live = CachingAllocator(expandable=expandable), {}
    for key, (size, age) in enumerate(calls):
        allocator.allocate(key, size)
        live[key] = size
        if age and len(live) > age:
            freed = list(live)[-age]
            allocator.free(freed)
            del live[freed]
        assert sum(live.values()) <= in_use(allocator) <= allocator.reserved
    for key in live:
        allocator.free(key)
    assert in_use(allocator) == 0
