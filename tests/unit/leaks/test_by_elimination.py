"""Causes that the operating system's and the allocator's numbers leave."""

from __future__ import annotations

import pytest

from memlog.leaks.elimination import by_elimination


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ({"malloc_used": 50.0, "malloc_free": 950.0}, "allocator_free_lists"),
        ({"malloc_used": 1000.0, "malloc_free": 0.0}, "native_library"),
    ],
)
def test_the_cause_that_explains_the_growth_is_named(numbers, kind):
    found = by_elimination(1000.0, **numbers)
    assert found is not None
    assert found.kind == kind
    assert found.bytes_per_step >= 800


def test_nothing_is_named_where_python_objects_explain_the_growth():
    assert by_elimination(1000.0, explained=700.0, malloc_used=1000.0) is None


def test_nothing_is_named_without_a_cause_that_explains_half():
    assert by_elimination(1000.0, malloc_used=100.0, malloc_free=200.0) is None


def test_events_of_torchs_profiler_are_named_as_such():
    found = by_elimination(1000.0, malloc_used=1000.0, profiling=True)
    assert found is not None
    assert found.kind == "native_library"
    assert "profiler" in found.title
