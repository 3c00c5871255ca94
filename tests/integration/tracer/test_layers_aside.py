"""A session that traces by itself, beside other tools in a training loop, without disturbing them."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
from support.events import recorded, traces
from support.modes import Users
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, grad_and_value
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import memlog
from memlog.events import Health
from memlog.tracer.engines import dispatch_mode

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_compiled", "runs")]

BATCH = torch.ones(4, 16)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(BATCH).square().mean().backward()
    optimizer.step()


def skipped(session: memlog.Session) -> int:
    """Return the number of skipped traces in the run's last health event."""
    return recorded(session, Health)[-1].dropped.get("trace_skipped", 0)


def left() -> list[Any]:
    return [
        *torch_modules._global_forward_pre_hooks.values(),
        *torch_modules._global_forward_hooks.values(),
        *torch_optimizers._global_optimizer_pre_hooks.values(),
        *_get_current_dispatch_mode_stack(),
        *(name for name in vars(torch.UntypedStorage) if name == "resize_"),
        *(text for text in map(str, warnings.filters) if "global hooks" in text),
    ]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = network()

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("wrapped", "the compiled model"),
        ("wrapped", "the model inside"),
        ("wrapped", "none"),
        ("in place", "the compiled model"),
        ("a part", "the model around it"),
    ],
)
def test_a_compiled_model_costs_no_warning_and_no_compilation(how: str, named: str) -> None:
    counter = CompileCounter()
    compiled = model = Model()
    optimizer = sgd(model)
    if how == "wrapped":
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    elif how == "in place":
        model.compile(backend=counter, fullgraph=True)
    else:
        model.net = torch.compile(model.net, backend=counter, fullgraph=True)
    given: Any = {"the compiled model": compiled, "none": None}.get(named, model)
    session = memlog.init("local", model=given, layers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            step(compiled, optimizer)
    session.snapshot()
    step(compiled, optimizer)
    memlog.finish()
    assert counter.frame_count == 1
    assert left() == []
    assert not session.health.faults
    if dispatch_mode.leaves_code_compiled():
        assert {one.step for one in traces(session)} >= {3, 8}
        assert not any(
            one.exact for one in traces(session)
        )  # what this compiler allocates is unknown
    else:
        assert not traces(session)
        assert skipped(session) == 2


@pytest.mark.skipif(
    not dispatch_mode.leaves_code_compiled(), reason="this torch's compiled steps are not traced"
)
def test_a_trace_that_ends_within_a_compiled_call_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of the call, torch took the mode for active. The backward pass then raised an error."""
    from memlog.tracer.schedule.budget import Budget

    model = Model()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend=CompileCounter(), fullgraph=True)
    session = memlog.init("local", model=model, layers=True)
    for _ in range(3):
        step(compiled, optimizer)
    monkeypatch.setattr(Budget, "limit", lambda _self, _now: 0.0)
    for _ in range(3):
        step(compiled, optimizer)
    memlog.finish()
    assert left() == []
    assert {one.cut for one in traces(session)} == {True}
    assert not session.health.faults


def test_a_model_that_is_compiled_in_place_after_init_is_compiled_once() -> None:
    counter = CompileCounter()
    model = Model()
    optimizer = sgd(model)
    session = memlog.init("local", layers=True)
    model.compile(backend=counter, fullgraph=True)
    for _ in range(8):
        step(model, optimizer)
    memlog.finish()
    assert counter.frame_count == 1
    assert left() == []
    assert not session.health.faults


def test_a_compiled_loss_is_compiled_once() -> None:
    counter = CompileCounter()
    model = network()
    optimizer = sgd(model)

    @torch.compile(backend=counter)
    def loss(batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch).square().mean()
        return out

    memlog.init("local", model=model, layers=True)
    for _ in range(6):
        optimizer.zero_grad()
        loss(BATCH).backward()
        optimizer.step()
    memlog.finish()
    assert counter.frame_count == 1


def test_a_window_whose_step_never_ends_is_abandoned() -> None:
    model = network()
    session = memlog.init("local", model=model, layers=True)
    for number in range(300):
        model(BATCH)
        if number == 10:
            assert left()
    # A session holds the optimizer's hooks as long as it lasts.
    assert left() == [*torch_optimizers._global_optimizer_pre_hooks.values()]
    optimizer = sgd(model)
    step(model, optimizer)
    memlog.finish()
    assert left() == []
    assert not traces(session)
    assert skipped(session) == 1


def test_operations_without_end_are_abandoned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from memlog.tracer import window
    from memlog.tracer.schedule import budget

    monkeypatch.setattr(budget, "MOST_EVENTS", 1000)
    monkeypatch.setattr(window, "TraceWindow", partial(window.TraceWindow, max_events=1000))
    model = network()
    optimizer = sgd(model)
    session = memlog.init("local", model=model, layers=True, budget=1)
    out = model(BATCH)
    for _ in range(2000):
        out = out.detach() + 1
    (mode,) = _get_current_dispatch_mode_stack()
    assert mode._observer is None  # type: ignore[attr-defined] # it only lets pass
    model(BATCH)
    assert _get_current_dispatch_mode_stack() == []
    step(model, optimizer)
    memlog.finish()
    assert left() == []
    assert skipped(session) == 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_mode_that_begins_in_the_step_and_ends_after_it(goes_on: bool) -> None:
    model = network()
    optimizer = sgd(model)
    session = memlog.init("local", model=model, layers=True)
    loss = model(BATCH).square().mean()
    with Users() as users:
        loss.backward()
        optimizer.step()
        ours, above = _get_current_dispatch_mode_stack()
        assert above is users
        assert ours._observer is None  # type: ignore[attr-defined] # it only lets pass
    if goes_on:
        model(BATCH)
        assert _get_current_dispatch_mode_stack() == []
    memlog.finish()
    assert left() == []
    assert len(traces(session)) == 1
    counter = CompileCounter()
    torch.compile(torch.sin, backend=counter)(BATCH)
    assert counter.frame_count == 1


def test_the_session_ends_below_a_mode_of_the_users() -> None:
    model = network()
    memlog.init("local", model=model, layers=True)
    model(BATCH)
    with Users() as users:
        memlog.finish()
        assert _get_current_dispatch_mode_stack()[-1] is users
    model(BATCH)
    assert left() == []


def test_the_thread_that_opened_a_window_has_ended() -> None:
    model = network()
    session = memlog.init("local", model=model, layers=True)
    thread = threading.Thread(target=lambda: model(BATCH).sum().backward())
    thread.start()
    thread.join(60)
    assert left()
    memlog.finish()
    assert left() == []
    (trace,) = traces(session)
    assert trace.step is None


def test_another_thread_trains_on() -> None:
    model = network()
    optimizer = sgd(model)
    session = memlog.init("local", model=model, layers=True)
    thread = threading.Thread(target=lambda: model(BATCH).sum().backward())
    thread.start()
    thread.join(60)
    step(model, optimizer)
    step(model, optimizer)
    assert [one for one in left() if not of_other_watches(one)] == [
        *torch_optimizers._global_optimizer_pre_hooks.values()
    ]
    memlog.finish()
    assert left() == []
    assert skipped(session) == 1


def of_other_watches(hook: Any) -> bool:
    """Return whether a hook or a warning filter belongs to the search for graphs that nothing uses."""
    return "UnusedGraphs" in repr(hook) or "global hooks" in str(hook)


def test_two_threads_open_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    from memlog.tracer.window import TraceWindow

    at_once, both = [], threading.Barrier(2)
    start, stop, abandon = TraceWindow.start, TraceWindow.stop, TraceWindow.abandon

    def started(window: TraceWindow) -> None:
        at_once.append(window)
        assert len(at_once) == 1
        start(window)

    def stopped(window: TraceWindow) -> Any:
        at_once.remove(window)
        return stop(window)

    def abandoned(window: TraceWindow) -> None:
        at_once.remove(window)
        abandon(window)

    monkeypatch.setattr(TraceWindow, "start", started)
    monkeypatch.setattr(TraceWindow, "stop", stopped)
    monkeypatch.setattr(TraceWindow, "abandon", abandoned)
    session = memlog.init("local", layers=True)

    def train(_number: int) -> None:
        model = network()
        optimizer = sgd(model)
        both.wait(60)
        for _ in range(40):
            step(model, optimizer)
            session.snapshot()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))
    memlog.finish()
    assert not session.health.faults
    assert at_once == []
    assert left() == []


def started_thread(target: Callable[[], None], until: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    assert until.wait(60)
    return thread


def trace_each_step(
    session: memlog.Session,
    model: nn.Module,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        session.snapshot()
        step(model, optimizer)


def test_a_trace_keeps_away_from_what_another_thread_trains() -> None:
    """Optuna's ``n_jobs`` uses threads. torch crashes if a thread reads a gradient that another resets."""

    class Watched(nn.Parameter):
        readers: ClassVar[set[int]] = set()

        @property
        def grad(self) -> Any:
            self.readers.add(threading.get_ident())
            return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

        @grad.setter
        def grad(self, value: Any) -> None:
            torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    theirs, mine, trained, over = network(), network(), threading.Event(), threading.Event()
    for layer in theirs:
        if isinstance(layer, nn.Linear):
            layer.weight = Watched(layer.weight.detach())
    session = memlog.init("local", layers=True)

    def train() -> None:
        optimizer = torch.optim.Adam(theirs.parameters())
        for _ in range(3):
            step(theirs, optimizer)
        trained.set()
        over.wait(60)

    thread = started_thread(train, trained)
    trace_each_step(session, mine, 3)
    memlog.finish()
    over.set()
    thread.join(60)
    assert Watched.readers == {thread.ident}
    assert not session.health.faults
    assert len(traces(session)) >= 2


def test_a_trace_does_not_wait_for_the_optimizer_of_another_thread() -> None:
    theirs, mine, stepped, over = network(), network(), threading.Event(), threading.Event()
    session = memlog.init("local", layers=True)

    def train() -> None:
        step(theirs, optimizer := sgd(theirs))
        stepped.set()
        over.wait(60)
        step(theirs, optimizer)

    optimizer = sgd(mine)
    step(mine, optimizer)  # so that this thread's steps are the session's
    thread = started_thread(train, stepped)
    trace_each_step(session, mine, 20, optimizer)
    over.set()
    thread.join(60)
    memlog.finish()
    _first, *found = traces(session)  # the first one is of the first step
    assert len(found) > 5
    assert all(trace.exact for trace in found)


def test_a_trace_leaves_out_the_optimizer_that_is_at_work_on_another_thread() -> None:
    """The window ends while the other optimizer works. It then ends only the step of its own optimizer."""

    class Waiting(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            at_work.set()
            over.wait(60)
            return done

    theirs, mine = torch.nn.Linear(256, 256), network()
    at_work, over = threading.Event(), threading.Event()
    session = memlog.init("local", layers=True)

    def train() -> None:
        theirs(torch.randn(8, 256)).square().mean().backward()
        Waiting(theirs.parameters()).step()

    optimizer = sgd(mine)
    step(mine, optimizer)
    session.snapshot()
    mine(BATCH).square().mean().backward()
    thread = started_thread(train, at_work)
    optimizer.step()
    over.set()
    thread.join(60)
    memlog.finish()
    found = traces(session)
    assert len(found) == 2
    state = 2 * 4 * sum(parameter.numel() for parameter in theirs.parameters())
    assert all((trace.peak or 0) < state for trace in found)
    assert not session.health.faults


def test_a_step_inside_torch_func_is_counted_as_skipped() -> None:
    model = network()
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    session = memlog.init("local", model=model, layers=True)

    def loss(values: Any) -> torch.Tensor:
        out: torch.Tensor = functional_call(model, values, (BATCH,)).square().mean()
        return out

    for _ in range(70):
        grad_and_value(loss)(parameters)
        session.step()
    memlog.finish()
    assert not session.health.faults
    # Attempts at steps 0, 1, 3, 7, 15, 31 and 63 become rarer, because each attempt takes time.
    assert skipped(session) == 7


def test_a_model_that_is_trained_in_the_mode_of_evaluation_is_traced() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval()
    frozen = network().requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    session = memlog.init("local", layers=True)
    frozen(BATCH)
    assert _get_current_dispatch_mode_stack() == []
    step(model, optimizer)
    memlog.finish()
    (trace,) = traces(session)
    assert {"0", "1"} <= {layer.path for layer in trace.layers}
