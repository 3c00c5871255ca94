"""Containers that grow, and the size of their elements."""

from __future__ import annotations

import array
import io
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest

from memlog.leaks.containers import Census, element_size, growing
from memlog.leaks.process_objects import TimeBudget, all_objects

pytestmark = pytest.mark.usefixtures("few_objects")


class Hostile(list):
    """A list whose methods must not run."""

    def __len__(self):
        raise AssertionError

    def __iter__(self):
        raise AssertionError

    def __hash__(self):
        raise AssertionError

    def __eq__(self, other):
        raise AssertionError

    def __getattribute__(self, name):
        raise AssertionError(name)


def budget():
    return TimeBudget(60.0)


def add_to(container, number):
    """Add an element that equals no other element."""
    for base, add in (
        (list, list.append),
        (deque, deque.append),
        (set, set.add),
        (bytearray, lambda one, _: one.extend(b"1234")),
    ):
        if issubclass(type(container), base):
            add(container, number)
            return
    dict.__setitem__(container, number, float(number))


@pytest.mark.parametrize(
    "make",
    [list, dict, set, deque, bytearray, OrderedDict, Counter, lambda: defaultdict(int), Hostile],
)
def test_a_container_that_is_longer_each_time_grows(make):
    container, censuses = make(), []
    holder = {"container": container}
    steady = list(range(50))
    for number in range(30):
        add_to(container, number)
        if number in (9, 19):
            censuses.append(Census(all_objects(), budget()))
    found = {id(one.container): one for one in growing(all_objects(), censuses, budget())}
    assert id(holder["container"]) in found
    assert id(steady) not in found
    assert found[id(container)].gained in (20, 80)


def test_a_full_ring_does_not_grow():
    ring, censuses = deque(range(20), maxlen=20), []
    for number in range(30):
        ring.append(number)
        if number in (9, 19):
            censuses.append(Census(all_objects(), budget()))
    assert not [one for one in growing(all_objects(), censuses, budget()) if one.container is ring]


def size_of_elements(container):
    censuses = [Census(all_objects(), budget()) for _ in range(2)]
    for number, census in enumerate(censuses):
        census.lengths[id(container)] = number
    (growth,) = (
        one for one in growing(all_objects(), censuses, budget()) if one.container is container
    )
    return element_size(growth, budget())


def test_what_elements_share_does_not_count():
    shared = [bytes(100_000)]
    size = size_of_elements(
        [{"shared": shared, "own": bytes(5_000 + number)} for number in range(20)]
    )
    assert 5_000 < size.objects < 6_000


def test_arrays_count_with_their_bytes():
    size = size_of_elements([np.zeros(10_000) for _ in range(20)])
    assert 80_000 < size.objects < 81_000


@pytest.mark.parametrize("make", [io.BytesIO, lambda data: array.array("B", data)])
def test_objects_of_c_types_count_with_what_they_say_they_hold(make):
    size = size_of_elements([make(bytes(10_000 + number)) for number in range(20)])
    assert 10_000 < size.objects < 11_000


def test_tensors_count_with_their_storages():
    import torch

    size = size_of_elements([torch.zeros(1000, 10)[0] for _ in range(20)])
    assert size.storages == 40_000


def test_a_budget_that_is_spent_ends_a_census():
    assert not Census(all_objects(), TimeBudget(0.0)).lengths
