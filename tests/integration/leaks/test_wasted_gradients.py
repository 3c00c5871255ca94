"""Gradients that nothing uses are found. Gradients that only look unused are not reported."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import pytest

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event, Finding

torch = pytest.importorskip("torch")
from memlog.leaks import wasted_gradients  # noqa: E402 - it loads torch
from memlog.leaks.wasted_gradients import WastedGradients  # noqa: E402
from memlog.torchside import internals  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.integration
STEPS = 60


@pytest.fixture(autouse=True)
def expected(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a look is expected to take. These trainings are too short to earn one."""
    seconds = [0.0]
    monkeypatch.setattr(wasted_gradients, "pass_seconds", lambda: seconds[0])
    return seconds


def mlp(width: int = 512) -> torch.nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 8)
    )


def found(steps: Iterator[None]) -> list[Finding]:
    """Train, and return the findings. Fail if a part of memlog is left in torch."""
    published: list[Event] = []
    diagnostics = Diagnostics()
    search = WastedGradients(published.append, diagnostics)
    for step, _ in enumerate(steps):
        search.after_step(step, busy=False)
    search.finish(STEPS)
    assert not diagnostics.faults
    assert not internals.mode_stack()
    return [one for one in published if isinstance(one, Finding)]


def distilled(
    freeze: Callable[[torch.nn.Module], object], *, by_hand: bool = False
) -> Iterator[None]:
    teacher, student = mlp(), mlp(32)
    freeze(teacher)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    for _ in range(STEPS):
        x = torch.randn(8, 64)
        optimizer.zero_grad()
        (student(x) - teacher(x)).square().mean().backward()
        optimizer.step()
        if by_hand:
            for parameter in teacher.parameters():
                parameter.data.sub_(0.01 * parameter.grad.data)
                parameter.grad.data.zero_()
        yield


def test_a_teacher_that_is_not_frozen_is_named() -> None:
    [finding] = found(distilled(lambda _: None))
    assert finding.kind == "unowned_gradients"
    assert finding.where == "`teacher of steps` in `found()`"  # the generator's local variable
    assert "take 1.1 MiB" in finding.title


def test_the_first_look_waits_until_the_run_has_earned_it(
    expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(
        wasted_gradients.UnownedGradients, "look", lambda _, step: looks.append(step)
    )
    began = time.monotonic()
    search = WastedGradients(lambda _: None, Diagnostics())
    after: dict[int, float] = {5: 0.0, 20: 39.0, 30: 41.0}
    seconds = 0.0
    monkeypatch.setattr(wasted_gradients.time, "monotonic", lambda: began + seconds)
    expected[0] = 0.2  # 0.5 % of 40 s
    for step in range(40):
        seconds = after.get(step, seconds)
        search.after_step(step, busy=False)
    search.finish(None)
    assert looks == [30]


@pytest.mark.parametrize(("seconds", "at"), [(0.049, [7]), (0.051, []), (0.6, [])])
def test_a_short_look_does_not_wait_and_a_long_one_never_begins(
    seconds: float, at: list[int], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 10 s of training may be used at once."""
    looks: list[int] = []
    monkeypatch.setattr(
        wasted_gradients.UnownedGradients, "look", lambda _, step: looks.append(step)
    )
    now = time.monotonic()
    monkeypatch.setattr(wasted_gradients.time, "monotonic", lambda: now)
    search = WastedGradients(lambda _: None, Diagnostics())
    expected[0] = seconds
    for step in range(40):
        search.after_step(step, busy=False)
    if seconds > 0.5:
        monkeypatch.setattr(wasted_gradients.time, "monotonic", lambda: now + 1e6)
        search.after_step(40, busy=False)
    search.finish(None)
    assert looks == at


def test_parameters_can_be_swapped_between_steps() -> None:
    """torch can't swap tensors that have weak references, so memlog must make none."""

    def converted() -> Iterator[None]:
        teacher, steps = mlp(), distilled(lambda _: None)
        teacher(torch.randn(8, 64)).sum().backward()
        for _ in steps:
            teacher.double().float()
            yield

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert len(found(converted())) == 1
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize(
    "steps",
    [
        lambda: distilled(lambda teacher: teacher.requires_grad_(requires_grad=False)),
        lambda: distilled(lambda _: None, by_hand=True),
        lambda: updated_now_and_then(),  # noqa: PLW0108 - defined below
        lambda: two_optimizers(),  # noqa: PLW0108 - defined below
        lambda: cleared_by_the_module(),  # noqa: PLW0108 - defined below
    ],
    ids=["frozen", "by hand", "now and then", "two optimizers", "cleared"],
)
def test_gradients_that_something_uses_or_clears_have_an_owner(
    steps: Callable[[], Iterator[None]],
) -> None:
    assert not found(steps())


def updated_now_and_then() -> Iterator[None]:
    """Train two networks. The second has no optimizer: its gradients add up and are applied now and then."""
    first, second = mlp(), mlp()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 64)
        (first(x) * second(x)).square().mean().backward()
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                for parameter in second.parameters():
                    parameter.sub_(0.01 * parameter.grad)
                    parameter.grad.zero_()
        yield


def two_optimizers() -> Iterator[None]:
    """Train a generator and a critic, which gets gradients in each step and whose optimizer steps rarely."""
    generator, critic = mlp(), mlp()
    clock = torch.optim.Adam(generator.parameters())
    rare = torch.optim.Adam(critic.parameters())
    for step in range(STEPS):
        x = torch.randn(8, 64)
        clock.zero_grad()
        (generator(x) * critic(x)).mean().backward()
        clock.step()
        if step % 50 == 49:
            rare.step()
            rare.zero_grad()
        yield


def cleared_by_the_module() -> Iterator[None]:
    model = nn.ModuleList([mlp(), mlp(32)])
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
    for _ in range(STEPS):
        model.zero_grad()
        x = torch.randn(8, 64)
        (model[0](x) - model[1](x)).square().mean().backward()
        optimizer.step()
        yield


class Features(nn.Module):
    """A network that can be used for its inner features instead of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = mlp(1024), nn.Linear(8, 4)
        self.kept = None
        self.inner[2].register_forward_hook(lambda _m, _a, out: setattr(self, "kept", out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


def evaluated(evaluate: Callable[[torch.nn.Module, torch.Tensor], object]) -> Iterator[None]:
    model = Features()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(600, 64)
    for step in range(STEPS):
        model.train()
        optimizer.zero_grad()
        model(x[:8]).square().mean().backward()
        optimizer.step()
        if step % 4 == 0:
            model.eval()
            evaluate(model, x)
        yield


def test_an_evaluation_without_no_grad_is_named() -> None:
    [finding] = found(evaluated(lambda model, x: model(x).argmax(1)))
    assert finding.kind == "forward_without_backward"
    assert finding.title.startswith("`<lambda>()` (test_wasted_gradients.py:")
    assert finding.where is not None
    assert finding.where.startswith("test_wasted_gradients.py:")
    assert "each takes 4.7 MiB" in finding.title  # 600 rows of 1,024 + 1,024 + 8 floats


def perceptual_loss(model: torch.nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    model(x)
    torch.autograd.grad(model.kept.square().mean(), x)


def under_no_grad(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def rollout(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Keep the graphs of five forward passes, and then run one backward pass through all of them."""
    kept = [model(x).mean() for _ in range(5)]
    torch.stack(kept).sum().backward()


def in_training_mode(model: torch.nn.Module, x: torch.Tensor) -> None:
    model.train()
    model(x)


def frozen_copy(model: torch.nn.Module, x: torch.Tensor) -> None:
    copy.deepcopy(model.inner).requires_grad_(requires_grad=False).eval()(x)


def checkpointed(model: torch.nn.Module, x: torch.Tensor) -> None:
    from torch.utils.checkpoint import checkpoint

    checkpoint(model, x, use_reentrant=False).mean().backward()


@pytest.mark.parametrize(
    "evaluate",
    [perceptual_loss, under_no_grad, rollout, in_training_mode, frozen_copy, checkpointed],
)
def test_passes_whose_graph_is_used_or_not_recorded_are_no_waste(
    evaluate: Callable[[torch.nn.Module, torch.Tensor], object],
) -> None:
    assert not found(evaluated(evaluate))
