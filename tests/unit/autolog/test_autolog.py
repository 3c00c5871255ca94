"""One event a step, from loops that know nothing of memlog."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from memlog.autolog.optimizer_steps import OPTIMIZER_MODULE, Autolog


class Counter:
    """Counter of steps while its hook is installed."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, _optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1


@pytest.fixture
def counter() -> Iterator[Counter]:
    counted = Counter()
    autolog = Autolog(counted)
    yield counted
    autolog.remove()


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    return kind([weight], lr=0.1)  # type: ignore[call-arg]


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, such as Lookahead or SAM."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_each_step_counts_once(counter: Counter, kind: type[torch.optim.Optimizer]) -> None:
    stepped = optimizer(kind)
    for _ in range(5):
        stepped.step()
    assert counter.steps == 5


def test_nested_steps_count_once(counter: Counter) -> None:
    wrapper = Wrapper(optimizer())
    for _ in range(5):
        wrapper.step()
    assert counter.steps == 5


def test_a_subclass_that_calls_its_parents_step_counts_once(counter: Counter) -> None:
    class Verbose(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)

    optimizer(torch.optim.AdamW)  # torch hooks a class's step when the first of its kind is made
    verbose = optimizer(Verbose)
    for _ in range(5):
        verbose.step()
    assert counter.steps == 5


def test_lbfgs_counts_its_steps_and_not_its_evaluations(counter: Counter) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    lbfgs = torch.optim.LBFGS([weight])

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        lbfgs.step(closure)
    assert counter.steps == 3


def test_another_takes_over_at_once_when_the_clock_is_deleted(counter: Counter) -> None:
    first = optimizer()
    first.step()
    del first
    gc.collect()
    second = optimizer()
    for _ in range(5):
        second.step()
    assert counter.steps == 6


def test_a_step_that_raises_does_not_count_and_breaks_nothing(counter: Counter) -> None:
    class Failing(Wrapper):
        fail = True

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if self.fail:
                raise ValueError("no")
            super().step(closure)

    failing = Failing(optimizer())
    with pytest.raises(ValueError, match="no"):
        failing.step()
    failing.fail = False
    failing.step()
    assert counter.steps == 1


def test_a_step_that_the_grad_scaler_skips_has_no_event(counter: Counter) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    stepped = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for value in (1.0, float("inf"), 1.0):
        stepped.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        scaler.step(stepped)
        scaler.update()
    assert counter.steps == 2


def test_a_module_that_another_thread_is_importing_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, OPTIMIZER_MODULE, ModuleType(OPTIMIZER_MODULE))
    Autolog(Counter()).remove()


def test_removed_hooks_are_gone() -> None:
    counted = Counter()
    autolog = Autolog(counted)
    autolog.remove()
    autolog.remove()
    optimizer().step()
    assert counted.steps == 0


def test_torch_imported_later_is_noticed_and_left_as_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that takes the hooks from torch stands in for torch's own, which is imported already."""
    hooks = "register_optimizer_step_pre_hook, register_optimizer_step_post_hook"
    lines = f"import torch\nfrom torch.optim.optimizer import {hooks}\n"
    (tmp_path / "late_torch.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("memlog.autolog.optimizer_steps.OPTIMIZER_MODULE", "late_torch")
    before, counted = list(sys.meta_path), Counter()
    autolog = Autolog(counted)
    module = import_module("late_torch")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    optimizer().step()
    assert counted.steps == 1
    autolog.remove()
    assert sys.meta_path == before


COMPILED = """
import warnings
import torch
warnings.filterwarnings("error", message="Dynamo does not know how to trace")
from torch._dynamo.testing import CompileCounter
import memlog

def graphs():
    torch._dynamo.reset()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1))
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def step():
        optimizer.step()

    for _ in range(3):
        weight.grad = torch.ones(4)
        step()
    return counter.frame_count, counter.op_count, weight.tolist()

bare = graphs()
with memlog.init("local"):
    assert graphs() == bare
"""


@pytest.mark.slow
def test_a_compiled_step_has_the_same_graphs_with_memlog_as_without(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=240, cwd=tmp_path)
