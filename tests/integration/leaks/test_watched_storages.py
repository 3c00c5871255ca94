"""The storages of watched iterations."""

import math

import pytest
import torch

from memlog._internal.diagnostics import Diagnostics
from memlog.leaks.watched_storages import StorageWatch

pytestmark = pytest.mark.integration


def test_an_iteration_in_which_the_time_was_spent_does_not_count():
    kept = []
    watch = StorageWatch(Diagnostics(), {}, most_seconds=60)
    watch.begin()
    for _ in range(2):
        kept.append(torch.ones(1000))
        kept.append(torch.ones(1000))
        watch.iteration_ended()
    kept.append(torch.ones(1000))
    watch.seconds = math.inf
    kept.append(torch.ones(1000))
    kept.append(torch.ones(1000))
    watch.iteration_ended()
    watch.end()
    assert watch.leave()

    assert watch.ended
    assert watch.iteration == 2
    assert [one.size for one in watch.alive().values()] == [4000] * 4


def test_a_first_iteration_counts_although_the_time_was_spent_in_it():
    watch = StorageWatch(Diagnostics(), {}, most_seconds=0)
    watch.begin()
    kept = [torch.ones(1000) for _ in range(3)]
    watch.iteration_ended()
    watch.end()
    assert watch.leave()

    assert watch.iteration == 1
    assert [one.size for one in watch.alive().values()] == [kept[0].nbytes]
