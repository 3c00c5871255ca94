"""The search changes nothing that training computes, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memlog._internal.diagnostics import Diagnostics
from memlog.leaks.holder_search import HolderSearch

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


def new_search(**settings):
    return HolderSearch(budget_seconds=60, step_seconds=60, diagnostics=Diagnostics(), **settings)


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
        assert "`kept`, a list in `train()`" in search.holders()[0].title


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 8, 14])
def test_a_search_that_is_cut_short_leaves_nothing(steps):
    hooks = len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)
    search = new_search()
    train(search, steps)
    search.stop()
    assert not _get_current_dispatch_mode_stack()
    assert hooks == (
        len(module_hooks._global_forward_hooks),
        len(module_hooks._global_forward_pre_hooks),
    )
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
        gc.disable()  # what is alive now is held, and no garbage
        search.step_ended(step)
        gc.enable()
    gc.disable()
    try:
        kept.clear()
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()
    assert search.holders()


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        out = model(torch.randn(8, 16))
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dict.__setitem__(kept, step, out.detach())
        search.step_ended(step)
    assert not search._diagnostics.faults
    assert search.holders()[0].title.startswith("`kept`, a Hostile in")


def test_a_saved_tensor_is_not_unpacked():
    unpacked = 0

    def unpack(packed):
        nonlocal unpacked
        unpacked += 1
        return packed

    search, kept = new_search(), []
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            kept.append(model(torch.randn(8, 16)).sum())
        optimizer.step()
        search.step_ended(step)
    assert unpacked == 0
    assert search.holders()[0].kind == "kept_graph"
