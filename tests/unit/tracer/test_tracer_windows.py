"""Tracing leaves nothing behind, and tolerates other modes, threads and windows."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.allocator import AllocatorTruth
from support.clean_torch import clean, hooks, nothing_stays_behind  # noqa: F401 - a fixture
from support.models import mlp
from support.modes import Users
from torch import nn
from torch.nn.modules import module as torch_modules

from memlog import MemoryTracer
from memlog.tracer.engines import op_workspace
from memlog.tracer.window import TraceWindow, may_open

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")
BATCH = torch.ones(4, 64)


@pytest.mark.parametrize("engine", ["dispatch", "sampler"])
@pytest.mark.seed(206)
def test_nothing_stays_behind_when_an_exception_leaves_the_block(engine: Any) -> None:
    tracer, model = MemoryTracer(engine=engine), mlp()
    with pytest.raises(ZeroDivisionError), tracer.trace(model):  # noqa: PT012 - it is the block that is tested
        model(BATCH)
        assert not clean()
        raise ZeroDivisionError
    assert clean()
    assert tracer.result.engine == engine
    assert tracer.get_layer_figures("0").phase("forward") is not None


def test_an_exception_inside_a_module_leaves_the_layers_in_order() -> None:
    class Failing(nn.Module):
        def forward(self, _x: Any) -> Any:
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Failing()))
    tracer = MemoryTracer()
    with tracer.trace(model):
        with pytest.raises(ValueError, match="no"):
            model(BATCH)
        outside = torch.zeros(1000)
        model[0](BATCH)
    assert tracer.result.unattributed["forward"] == outside.nbytes
    figures: Any = tracer.get_layer_figures("0").phase("forward")
    assert figures.calls == 2
    figures = tracer.get_layer_figures("1.0").phase("forward")
    assert figures.calls == 1


def test_a_hook_that_raises_before_ours_leaves_the_layers_in_order() -> None:
    class RefusedError(Exception):
        pass

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.refused = nn.ReLU()

        def forward(self, x: Any) -> Any:
            try:
                self.refused(x)
            except RefusedError:
                return x + torch.ones(1000).sum()

    def refuse(module: Any, _args: Any) -> None:
        if isinstance(module, nn.ReLU):
            raise RefusedError

    model = nn.Sequential(Catching(), nn.Linear(64, 64))
    tracer = MemoryTracer()
    handle = torch_modules.register_module_forward_pre_hook(refuse)
    try:
        with tracer.trace(model):
            model(BATCH)
    finally:
        handle.remove()
    catching: Any = tracer.get_layer_figures("0").phase("forward")
    assert (catching.calls, catching.allocated) == (1, 4000 + 4 + BATCH.nbytes)
    around: Any = tracer.get_layer_figures("Sequential").phase("forward")
    assert (around.calls, around.allocated) == (1, 0)
    assert not tracer.health.faults


def test_nested_tracers_agree_on_what_the_inner_one_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, stride=2))
    batch = torch.ones(4, 3, 32, 32)

    def step() -> None:
        model(batch).square().mean().backward()
        positive = batch[batch > 0]  # what it takes is measured at every call
        del positive
        model.zero_grad()

    step()
    with AllocatorTruth() as allocator:
        step()
    monkeypatch.setattr(op_workspace, "_known", {})
    tracers = [MemoryTracer() for _ in range(3)]
    with tracers[0].trace(model), tracers[1].trace(model), tracers[2].trace(model):
        step()
    for tracer in tracers:
        result: Any = tracer.result
        assert result.peak - result.before == pytest.approx(allocator.result().peak, rel=0.002)
        assert (result.exactness, result.dropped) == ("exact", {})


@pytest.mark.seed(199)
def test_two_threads_with_a_tracer_each_do_not_mix() -> None:
    both_trace = threading.Barrier(2, timeout=60)
    first_is_in, first_is_out = threading.Event(), threading.Event()
    tracers = [MemoryTracer(), MemoryTracer()]
    models = [nn.Sequential(nn.Linear(64, width)) for width in (32, 96)]

    def work(number: int) -> None:
        if number == 1:
            first_is_in.wait(60)
        with tracers[number].trace(models[number]):
            first_is_in.set()
            both_trace.wait()
            for _ in range(5):
                models[number](BATCH).sum().backward()
            both_trace.wait()
            # The first to begin is the first to end: torch's own flags don't survive that.
            assert number == 0 or first_is_out.wait(60)
        first_is_out.set()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    for tracer, width in zip(tracers, (32, 96), strict=True):
        forward: Any = tracer.get_layer_figures("0").phase("forward")
        assert (forward.calls, forward.allocated) == (5, 5 * 4 * width * 4)
        assert tracer.get_layer_figures("0").phase("backward") is not None
        assert not tracer.health.faults


@pytest.mark.seed(202)
def test_a_model_is_saved_and_copied_while_it_is_traced() -> None:
    tracer, model = MemoryTracer(), mlp()
    optimizer = torch.optim.Adam(model.parameters())
    before = {key: list(vars(module)) for key, module in model.named_modules()}
    with tracer.trace(model):
        model(BATCH).sum().backward()
        optimizer.step()
        pickled = pickle.dumps(model)
        whole, state = io.BytesIO(), io.BytesIO()
        torch.save(model, whole)
        torch.save(optimizer.state_dict(), state)
        copied = copy.deepcopy(model)
    again = pickle.loads(pickled)  # noqa: S301 - just written
    assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index] # mlp() is a Sequential
    assert torch.equal(copied[0].weight, model[0].weight)  # type: ignore[index] # likewise
    assert before == {key: list(vars(module)) for key, module in model.named_modules()}


def test_what_is_traced_is_not_kept_alive() -> None:
    tracer, model = MemoryTracer(), mlp()
    with tracer.trace(model):
        out = model(BATCH)
        gone = weakref.ref(out.untyped_storage())
        del out
        assert gone() is None
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert tracer.result.peak


def test_the_users_dispatch_modes_work_inside_and_around() -> None:
    tracer, model, mode = MemoryTracer(), mlp(), Users()
    with tracer.trace(model), mode:
        model(BATCH)
    inside = mode.count
    assert inside > 0
    assert tracer.result.attributed == 1.0
    with mode, tracer.trace(model):
        model(BATCH)
    assert mode.count > inside
    assert tracer.result.attributed == 1.0


def test_no_window_opens_while_a_graph_is_recorded() -> None:
    """The tracer's operations would be recorded. ``torch.jit.trace`` fails if a second recording differs."""
    opened = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        opened.append(may_open())
        return 2 * x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(doubled, torch.ones(2), check_trace=False)
    assert opened == [False]


def test_a_window_that_is_closed_below_the_users_mode_leaves_later() -> None:
    model, mode = mlp(), Users()
    assert may_open()
    window = TraceWindow(model)
    window.start()
    assert not may_open()
    with mode:
        trace = window.stop()
        assert not window.leave()
        before = trace.result.events
        model(BATCH)  # passes through
        assert mode.count > 0
    assert window.leave()
    assert window.stop().result.events == before
    assert may_open()


def test_tracers_that_overlap_without_being_nested() -> None:
    model = mlp()
    first, second = MemoryTracer().trace(model), MemoryTracer().trace(model)
    first.__enter__()
    second.__enter__()
    model(BATCH)
    first.__exit__(None, None, None)
    assert not clean()
    second.__exit__(None, None, None)
    assert clean()


def test_a_trace_that_ends_on_another_thread_leaves_with_the_next_call() -> None:
    model = mlp()
    tracer = MemoryTracer()
    trace = tracer.trace(model)
    trace.__enter__()
    model(BATCH)
    thread = threading.Thread(target=trace.__exit__, args=(None, None, None))
    thread.start()
    thread.join(60)
    assert tracer.result.peak
    model(BATCH)
    assert clean()


def test_functions_of_torch_func_are_traced() -> None:
    from torch.func import functional_call, grad, vmap

    model = mlp()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    tracer = MemoryTracer()

    def loss(values: Any, one: Any) -> Any:
        return functional_call(model, values, (one[None],)).square().mean()

    def work() -> Any:
        return vmap(grad(loss), in_dims=(None, 0))(parameters, BATCH)

    bare = work()
    with tracer.trace(model):
        traced = work()
    assert all(torch.equal(bare[name], traced[name]) for name in bare)
    assert not tracer.health.faults
    assert any("torch.func" in sentence for sentence in tracer.result.unseen)
    made: Any = tracer.result.end
    assert made - (tracer.result.before or 0) == sum(value.nbytes for value in traced.values())


def test_time_begins_as_the_window_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the trace's layers would not enclose the operations that a profiler has recorded."""
    from types import SimpleNamespace

    from memlog.tracer.engines import storage_events

    clock = SimpleNamespace(now=5_000_000)
    reads = SimpleNamespace(time_ns=lambda: clock.now, perf_counter_ns=lambda: clock.now)
    monkeypatch.setattr(storage_events, "time", reads)
    window = TraceWindow(mlp())
    clock.now += 1_000_000
    window.start()
    clock.now += 7000
    result = window.stop().result
    assert (result.started_us, result.duration_ms) == (6000, 0.007)
