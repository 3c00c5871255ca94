"""Causes that the operating system's and the allocator's numbers leave."""

from __future__ import annotations

import pytest

from memlog.leaks.elimination import by_elimination


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        (
            {"children": {"DataLoader worker 3": 900.0, "DataLoader worker 0": 10.0}},
            "worker_process",
        ),
        ({"shared_memory": 800.0}, "shared_memory"),
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
    assert by_elimination(1000.0, malloc_used=100.0, children={"worker": 200.0}) is None


def test_the_worker_is_named_by_its_role():
    found = by_elimination(1000.0, children={"DataLoader worker 3": 900.0})
    assert found is not None
    assert found.where == "DataLoader worker 3"
