"""The search changes nothing that training computes, and leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memlog._internal.diagnostics import Diagnostics
from memlog.leaks.holder_search import HolderSearch
from memlog.leaks.process_objects import running_variables

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("few_objects")]


def train(search, steps=20, *, compiled=False):
    """Train with dropout and a list that keeps outputs; return all losses and parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 16))
    called = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.Adam(model.parameters())
    losses, kept = [], []
    for step in range(steps):
        out = called(torch.randn(8, 16))
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(out)
        losses.append(loss.item())
        if search is not None:
            search.step_ended(step)
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def new_search():
    return HolderSearch(budget_seconds=60, diagnostics=Diagnostics(), rate=0.0)


def steps_of(search, model, steps=20):
    """Yield in each step, for its forward and backward pass. Then step the optimizer, and the search."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        yield step
        optimizer.step()
        optimizer.zero_grad()
        search.step_ended(step)


@pytest.mark.parametrize("compiled", [False, True])
def test_no_bit_of_training_changes(compiled):
    torch.compiler.reset()
    losses, parameters = train(None, compiled=compiled)
    torch.compiler.reset()
    search = new_search()
    with_search, parameters_with_search = train(search, compiled=compiled)
    assert with_search == losses
    for one, other in zip(parameters, parameters_with_search, strict=True):
        assert torch.equal(one, other)
    if not compiled:
        assert "`kept`, a list in `train()`" in search.holders[0].title


def hooks_of_modules():
    return len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_search_that_is_cut_short_leaves_nothing(steps):
    hooks = hooks_of_modules()
    search = new_search()
    train(search, steps)
    search.stop()
    assert not _get_current_dispatch_mode_stack()
    assert hooks == hooks_of_modules()
    search.stop()


def test_no_object_of_the_program_stays_alive():
    search = new_search()
    references = []
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for step in range(20):
        out = model(torch.randn(8, 16))
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        references.append(weakref.ref(out))
        kept.append(out)
        del out
        gc.disable()  # all objects that are alive now have a holder
        search.step_ended(step)
        gc.enable()
    gc.disable()
    try:
        kept.clear()
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()
    assert search.holders


def test_code_of_the_program_does_not_run():
    class Hostile(dict):
        def _refuse(self, *_):
            raise AssertionError

        __len__ = __eq__ = __iter__ = __getitem__ = __repr__ = __contains__ = __bool__ = _refuse
        keys = values = items = get = _refuse

        @property
        def __class__(self):
            raise AssertionError

        def __getattribute__(self, name):
            raise AssertionError(name)

    search, kept = new_search(), Hostile()
    model = nn.Linear(16, 16)
    for step in steps_of(search, model):
        out = model(torch.randn(8, 16))
        out.mean().backward()
        dict.__setitem__(kept, step, out.detach())
    assert not search._diagnostics.faults
    assert search.holders[0].title.startswith("`kept`, a Hostile in")


def test_a_saved_tensor_is_not_unpacked():
    unpacked = 0

    def unpack(packed):
        nonlocal unpacked
        unpacked += 1
        return packed

    search, kept = new_search(), []
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    for _ in steps_of(search, model):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            kept.append(model(torch.randn(8, 16)).sum())
    assert unpacked == 0
    assert search.holders[0].kind == "kept_graph"


def test_modes_of_the_program_do_not_see_the_search():
    seen = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    counts = []
    for search in (None, new_search()):
        seen.clear()
        with Counting():
            train(search)
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_code_of_modules_does_not_run():
    class Strict(nn.Linear):
        def __getattr__(self, name):
            if name == "_orig_mod":
                raise SystemExit(name)
            return super().__getattr__(name)

        def named_modules(self, *_args, **_kwargs):
            assert not searching
            return super().named_modules(*_args, **_kwargs)

    search, kept, searching = new_search(), [], False
    model = nn.Sequential(Strict(16, 16), nn.ReLU())
    for _ in steps_of(search, model):
        searching = True
        kept += [model(torch.randn(8, 16))]
    assert not search._diagnostics.faults
    assert search.holders[0].kind == "kept_graph"


def test_parameters_can_be_swapped_during_a_search():
    search = new_search()
    model = nn.Linear(16, 16)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in steps_of(search, model):
            model.double().float()
            model(torch.randn(8, 16)).mean().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert search.complete


def test_an_iteration_of_very_many_operations_is_not_watched_to_its_end():
    search = new_search()
    train(search, 2)
    watch = search._watch
    assert watch is not None
    watch._most_seconds = 0.025
    value = torch.ones(1)
    for _ in range(100_000):
        value = value + 1
        if not watch._mode.measures:
            break
    assert not watch._mode.measures
    nn.Identity()(value)
    assert not _get_current_dispatch_mode_stack()
    search.stop()


def test_only_one_thread_goes_on_with_a_search():
    hooks = hooks_of_modules()
    search = new_search()
    begin, others = search._begin_watching, []

    def slow_begin():
        search._begin_watching = begin
        other = threading.Thread(target=lambda: others.append(search.step_ended(2)))
        other.start()
        other.join()
        begin()

    search._begin_watching = slow_begin
    search.step_ended(0)
    search.step_ended(1)
    search.stop()
    assert others == [False]
    assert hooks_of_modules() == hooks


def test_a_search_that_another_thread_stops_leaves_nothing():
    search = new_search()
    begin = search._begin_watching
    search._begin_watching = lambda: (search.stop(), begin())
    search.step_ended(0)
    assert search.step_ended(1)
    assert not _get_current_dispatch_mode_stack()


def test_variables_of_another_thread_stay_as_they_are():
    begun, ended, values = threading.Event(), threading.Event(), []

    def follow(_frame, event, _argument):
        if event == "c_call" and not begun.is_set():
            begun.set()
            ended.wait(60)  # Python writes the variables back when this returns

    def other():
        number = 1
        sys.setprofile(follow)
        len("")
        sys.setprofile(None)
        values.append(number)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(60)
    try:
        running_variables(lambda _file: True)
    finally:
        ended.set()
        thread.join()
    assert values == [1]


def test_no_bit_of_a_gradient_changes():
    """Some derivatives are computed in another way below a dispatch mode."""

    def gradients(search):
        torch.manual_seed(0)
        model = nn.Linear(64, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if search is not None:
            search.step_ended(0)
            search.step_ended(1)
        out, value = model(torch.randn(256, 64)), torch.randn((), requires_grad=True)
        filled = out.masked_fill(out > 0, value).cos().sum() + out[:8, :4].prod(1).sum()
        filled.backward()
        optimizer.step()
        return value.grad, model.weight.grad

    search = new_search()
    with_search = gradients(search)
    assert search._watch is not None
    search.stop()
    for one, other in zip(gradients(None), with_search, strict=True):
        assert torch.equal(one, other)
