"""Containers that grow, and the size of their elements."""

from __future__ import annotations

import array
import io
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest

from memlog._internal.inert_access import CONTAINERS, container_base
from memlog.leaks.containers import Census, element_size, growing
from memlog.leaks.process_objects import TimeBudget, all_objects, objects_of

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


class Meta(type):
    def __hash__(cls):
        raise AssertionError


class OddList(list, metaclass=Meta):
    """A list whose class can't be hashed."""


def test_containers_alone_are_counted_as_among_all_objects():
    kept = [
        Hostile([1]),
        OddList([1, 2]),
        bytearray(b"123"),
        {1: 2},
        Counter("aab"),
        [],
        deque([1]),
    ]
    of_containers = objects_of(*CONTAINERS)
    among_all = [one for one in all_objects() if container_base(one) is not None]
    own = {id(one) for one in kept}
    found = [own.intersection(map(id, some)) for some in (of_containers, among_all)]
    # A bytearray, and a dictionary of numbers, are not tracked: they are known by their variable alone.
    assert found[0] == found[1]
    assert len(found[0]) == 5
    censuses = [Census(some, budget()).lengths for some in (of_containers, among_all)]
    lengths = [[census.get(id(one)) for one in kept] for census in censuses]
    assert lengths[0] == lengths[1] == [1, 2, None, None, 2, None, 1]


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
