"""Causes that the operating system's and the allocator's numbers leave."""

from __future__ import annotations

import pytest

from memlog.leaks.holders import Holder
from memlog.leaks.other_causes import between_free_memory, by_elimination


@pytest.mark.parametrize(
    ("explained", "used", "free", "kind"),
    [
        (0.0, 50.0, 950.0, "allocator_free_lists"),
        (0.0, 1000.0, 0.0, "native_library"),
        (700.0, 1000.0, 0.0, None),
        (0.0, 100.0, 200.0, None),
    ],
)
def test_the_cause_that_explains_half_of_the_growth_is_named(explained, used, free, kind):
    found = by_elimination(
        1000.0, explained=explained, malloc_used=used, malloc_free=free, profiling=False
    )
    assert (None if found is None else found.kind) == kind
    assert found is None or found.bytes_per_step >= 800


def test_events_of_torchs_profiler_are_named_as_such():
    found = by_elimination(
        1000.0, explained=0.0, malloc_used=1000.0, malloc_free=0.0, profiling=True
    )
    assert found is not None
    assert found.kind == "native_library"
    assert "profiler" in found.title


def test_small_tensors_that_are_kept_are_named_for_free_memory_of_the_allocator():
    def holder(kind):
        return Holder(kind, "`kept`, a list, gains.", "train.py:3", 700.0, (), "high", "Append …")

    [found] = between_free_memory([holder("growing_container"), holder("kept_graph")])
    assert found.title.startswith(
        "`kept`, a list, gains. The C library's allocator can't give back"
    )
    assert (found.kind, found.confidence) == ("kept_graph", "medium")
    assert found.remedy is not None
    assert found.remedy.startswith("Remove old elements, keep only numbers (`.item()`)")
    assert between_free_memory([holder("growing_container")]) == []


def test_the_remedy_for_a_container_with_a_limit_lets_it_fill():
    holder = Holder(
        "kept_tensors", "`slots`, a list, gains.", None, 700.0, (), "high", None, bytes_left=7e4
    )
    [found] = between_free_memory([holder])
    assert found.bytes_left == holder.bytes_left
    assert found.remedy is not None
    assert found.remedy.startswith("Keep the elements in one tensor")
