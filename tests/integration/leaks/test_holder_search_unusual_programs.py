"""The search in programs with objects and tools that it can't treat like others."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections import Counter, OrderedDict, deque

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memlog._internal.diagnostics import Diagnostics
from memlog.leaks.containers import Census
from memlog.leaks.holder_search import HolderSearch
from memlog.leaks.live_tensors import views_of
from memlog.leaks.other_causes import AllocationTrace
from memlog.leaks.process_objects import TimeBudget

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("few_objects")]


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.name = "named"
        return value * 2

    @staticmethod
    def backward(_ctx, gradient):
        return 2 * gradient


class LooksLikeANode:
    next_functions = ()

    def __getattr__(self, name):
        raise SystemExit(name)


class Proxy:
    @property
    def __class__(self):
        raise SystemExit


def custom_function(kept, model):
    kept.append(Named.apply(model(torch.randn(8, 16))))


def lookalike(kept, model):
    kept.extend((LooksLikeANode(), model(torch.randn(8, 16))))


def transformation(kept, model):
    kept.append(torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(torch.randn(8, 16)))


def escaped(kept, model):
    torch.func.vmap(lambda x: kept.append(x * 2) or x)(torch.ones(8, 16))
    kept.append(model(torch.randn(8, 16)))


def nested(kept, model):
    kept.append(model(torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(3, 16)])))


def lazy(kept, model):
    kept.extend((nn.LazyLinear(3), model(torch.randn(8, 16))))


def proxy(kept, model):
    model.register_forward_pre_hook(lambda _module, args: args[:1])
    kept.append(model(torch.randn(8, 16), Proxy()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "keep", [custom_function, lookalike, transformation, escaped, nested, lazy, proxy]
)
def test_an_unusual_object_does_not_end_the_search(keep):
    model, kept = nn.Linear(16, 16), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    search = HolderSearch(budget_seconds=60, diagnostics=Diagnostics(), rate=0.0)
    for step in range(20):
        keep(kept, model)
        model(torch.randn(8, 16)).mean().backward()
        optimizer.step()
        search.step_ended(step)
    assert not search._diagnostics.faults
    assert "`kept`, a list" in search.holders[0].title


def begin(search):
    """Go on until the search watches what a step makes."""
    search.step_ended(0)
    search.step_ended(1)
    assert search._watch is not None


def test_a_profile_counts_each_operation_once():
    model = nn.Linear(16, 16)
    search = HolderSearch(budget_seconds=60, diagnostics=Diagnostics(), rate=0.0)
    begin(search)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.randn(8, 16))
    search.stop()
    counts = {one.key: one.count for one in profile.key_averages()}
    assert counts["aten::addmm"] == 1


def test_a_forked_process_is_not_watched():
    search = HolderSearch(budget_seconds=60, diagnostics=Diagnostics(), rate=0.0)
    begin(search)
    child = os.fork()
    if not child:
        os._exit(sum(mode._observer is not None for mode in _get_current_dispatch_mode_stack()))
    search.stop()
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_is_not_traced():
    trace = AllocationTrace()
    assert trace.start()
    child = os.fork()
    if not child:
        os._exit(tracemalloc.is_tracing())
    trace.stop()
    assert os.waitpid(child, 0)[1] == 0


def test_tracing_that_the_program_starts_goes_on():
    original = tracemalloc.start
    trace = AllocationTrace()
    assert trace.start()
    tracemalloc.start(3)
    try:
        assert not trace.running
        trace.stop()
        assert tracemalloc.get_traceback_limit() == 3
        assert tracemalloc.start is original
    finally:
        tracemalloc.stop()


def test_too_many_traced_allocations_end_the_trace():
    trace = AllocationTrace()
    assert trace.start()
    kept = [[] for _ in range(200_000)]
    assert not trace.running
    trace.stop()
    assert kept


def test_a_step_that_makes_millions_of_objects_ends_the_trace():
    trace = AllocationTrace()
    assert trace.start()
    kept = []
    while tracemalloc.is_tracing():
        kept.append(object())
        assert len(kept) < 20_000_000
    assert not trace.finish(1)


def test_a_trace_that_makes_a_step_much_longer_ends_within_the_step():
    trace = AllocationTrace(step_seconds=0.0, seconds=0.05)
    assert trace.start()
    began = time.process_time()
    while tracemalloc.is_tracing():
        assert time.process_time() - began < 60
    assert trace.slower_by > 0.05
    assert not trace.finish(1)


def test_the_usual_time_of_steps_does_not_end_a_trace():
    trace = AllocationTrace(step_seconds=60.0, seconds=0.0)
    assert trace.start()
    trace.step_ended()
    assert -120 <= trace.slower_by < -60
    assert trace.running
    trace.stop()


@pytest.mark.parametrize("kind", [list, deque, OrderedDict, Counter])
def test_elements_of_a_huge_container_are_not_looked_at(kind):
    array = torch.ones(3).numpy()
    tensor = array.base

    def views(length):
        values = [array] * length
        one = kind(dict(enumerate(values))) if issubclass(kind, dict) else kind(values)
        return views_of([one], [tensor], Census([one], TimeBudget(60)).huge, TimeBudget(60))

    assert not views(300_000)
    assert views(10)
