"""Tracing now and then changes nothing that training computes, whatever the loop does."""

import contextlib
import io
from collections.abc import Callable

import pytest
import torch
from support.events import traces
from torch import nn
from torch.utils.checkpoint import checkpoint

import memlog
from memlog.events import Trace

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("runs")]

STEPS = 24


class Net(nn.Module):
    """A network with modules that draw random numbers and modules that keep buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8))
        self.mix = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.out = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).transpose(1, 2)
        x = x + self.mix(x, x, x)[0]
        out: torch.Tensor = checkpoint(self.out, x, use_reentrant=False)
        return out


class Training:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(6, 4, 16)).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> bytes:
        """All state on which the next step depends."""
        state = io.BytesIO()
        parts = [self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()]
        torch.save([parts, self.losses], state)
        return state.getvalue()


def plain(training: Training, _step: int) -> None:
    loss = training.loss()
    loss.backward()
    training.losses.append(loss.item())
    training.update()


def accumulating(training: Training, _step: int) -> None:
    for _ in range(3):
        (training.loss() / 3).backward()
    training.update()


def autocast(training: Training, _step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = training.loss()
    loss.backward()
    training.update()


def scaled(training: Training, step: int) -> None:
    """Train a step with a scaler. In every third step the scaler does not step the optimizer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss = scaler.scale(training.loss())
    (loss * float("inf") if step % 3 == 2 else loss).backward()
    scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()


def failing(training: Training, step: int) -> None:
    """Train a step, and skip a bad batch, which fails in the forward or in the backward pass."""

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("bad batch")

    with contextlib.suppress(ValueError):
        out = training.model(torch.randn(6, 4, 16))
        if step % 4 == 1:
            fail(out)
        if step % 4 == 3:
            out.register_hook(fail)
        out.square().mean().backward()
    training.update()


Step = Callable[[Training, int], None]


def trained(step: Step, *, traced: bool) -> tuple[bytes, list[Trace]]:
    """Return the state at the end, and the traces: of each of the first steps, then of some."""
    session = memlog.init("local", layers=traced, budget=1.0)
    training = Training()
    for number in range(STEPS):
        if traced and number < 8:
            session.snapshot()
        step(training, number)
    memlog.finish()
    assert not session.health.faults
    return training.state(), traces(session)


@pytest.mark.parametrize("step", [plain, accumulating, autocast, scaled, failing])
def test_training_is_bit_for_bit_the_same(step: Step) -> None:
    without, nothing = trained(step, traced=False)
    traced, found = trained(step, traced=True)
    assert traced == without
    assert not nothing
    assert len(found) >= 6
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_micro_batches_of_one_step_are_traced_together() -> None:
    """The peak of a step that accumulates is that of its worst micro-batch."""
    sizes = (2, 64, 4)
    session = memlog.init("local", layers=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in sizes:
        model(torch.ones(size, 64)).square().mean().backward()
    optimizer.step()
    memlog.finish()
    (trace,) = traces(session)
    assert trace.step == 0
    assert trace.at_peak["activations"] >= 64 * 256 * 4
    assert trace.at_peak["gradients"] > 0


def test_two_networks_that_take_turns_are_both_found_and_keep_their_names() -> None:
    """The session gets no model. The step of each of the two optimizers counts as a training step."""
    session = memlog.init("local", layers=True, budget=1.0)
    made, judged = Net(), nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 1))
    optimizers = [torch.optim.Adam(net.parameters()) for net in (made, judged)]
    flipped = torch.nn.Identity()  # a transform: it has no parameters, and is called first
    for number in range(6):
        session.snapshot()
        judged(made(flipped(torch.randn(6, 4, 16)))).mean().backward()
        optimizers[number % 2].step()
    memlog.finish()
    weights = sum(p.nbytes for net in (made, judged) for p in net.parameters())
    seen = traces(session)
    assert {trace.at_peak["parameters"] for trace in seen} == {weights}
    names = {layer.path for trace in seen for layer in trace.layers}
    assert all(name.startswith("(") for name in names)  # neither network is "the model"
    assert {"(Net)", "(Sequential)"} <= {name.partition(".")[0] for name in names}
    assert not session.health.faults
