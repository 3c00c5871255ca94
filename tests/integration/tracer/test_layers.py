"""A session that traces a step now and then, by itself."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from support.commands import output_of
from support.events import recorded, traces
from support.modes import Users

import memlog
from memlog._internal.terminal import format_bytes
from memlog.events import CUT, Artifact, Batch
from memlog.journal import list_runs
from memlog.metrics import values
from memlog.reports.worst_step import read_worst_step
from memlog.torchside import internals

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_compiled", "runs")]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        self.head = torch.nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


class Loop:
    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, batch: int = 512) -> None:
        self.model(torch.ones(batch, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_the_first_step_and_a_warm_one_are_traced() -> None:
    loop = Loop()
    session = memlog.init("local", model=loop.model, layers=True)
    for _ in range(5):
        loop.step()
    memlog.finish()
    first, trace = traces(session)
    assert (first.step, first.engine, first.exact) == (0, "dispatch", True)
    assert (trace.step, trace.engine, trace.exact) == (2, "dispatch", True)
    assert trace.peak > first.peak  # the optimizer's state is there from the start
    activations = 512 * 256 * 4
    assert trace.at_peak["activations"] >= activations
    assert sum(trace.at_peak.values()) == trace.peak
    encoder = next(layer for layer in trace.layers if layer.path.startswith("encoder"))
    assert encoder.peak is not None
    names = {value.name for value in values(trace)}
    assert {"memory/trace/peak_mib", "memory/trace/activations_mib"} <= names
    assert "memory/layers/encoder.0.peak_mib" in names
    kept = [artifact for artifact in recorded(session, Artifact) if artifact.kind == "flamegraph"]
    artifact = kept[-1]
    graph = json.loads(gzip.decompress((session.directory / artifact.path).read_bytes()))
    assert graph["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert any("encoder.0" in frame["name"] for frame in graph["shared"]["frames"])
    assert [event.step for event in recorded(session, Batch)] == list(range(5))


def test_a_sessions_first_step_is_shown_as_a_tracer_shows_it() -> None:
    """The session closes its window in the step's own hook. torch tells the tracer of the end later."""
    alone, loop = Loop(), Loop()
    tracer = memlog.MemoryTracer()
    with tracer.trace(alone.model):
        alone.step(batch=2)
    session = memlog.init("local", model=loop.model, layers=True)
    loop.step(batch=2)
    memlog.finish()
    (trace,) = traces(session)
    categories = tracer.result.categories
    assert categories["optimizer state"] >= 2 * sum(p.nbytes for p in loop.model.parameters())
    assert {name: size for name, size in trace.at_peak.items() if size} == {
        name: size for name, size in categories.items() if size
    }


@pytest.mark.seed(194)
def test_a_worse_step_takes_the_place_of_the_graph() -> None:
    loop = Loop()
    session = memlog.init("local", layers=True, config={"memlog": {"sample_interval": 0.05}})
    loop.step()
    deadline = time.monotonic() + 60
    while not recorded(session, Artifact):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for batch in (8, 4096):
        session.snapshot()
        loop.step(batch)
    memlog.finish()
    first, smaller, larger = traces(session)
    assert (smaller.step, larger.step) == (1, 2)
    assert smaller.peak < first.peak < larger.peak
    graphs = [artifact for artifact in recorded(session, Artifact) if artifact.kind == "flamegraph"]
    names = [artifact.name for artifact in graphs]
    assert names == ["worst-step.html", "worst-step.speedscope.json.gz"] * 2


def test_without_layers_a_snapshot_traces_one_step() -> None:
    loop = Loop()
    session = memlog.init("local", budget=1.0)
    loop.step(batch=2)
    memlog.snapshot()
    for _ in range(60):  # enough for further traces, if layers were on
        loop.step(batch=2)
    memlog.finish()
    [trace] = traces(session)
    assert trace.step == 1
    # The session was given no model. It traces the called model with its optimizer's state.
    numbers = sum(parameter.numel() for parameter in loop.model.parameters())
    assert trace.at_peak["parameters"] == 4 * numbers
    assert trace.at_peak["optimizer state"] >= 2 * 4 * numbers


def test_evaluation_is_not_taken_for_training() -> None:
    loop = Loop()
    session = memlog.init("local", layers=True)
    with torch.no_grad():
        loop.model(torch.ones(2, 64))
    assert torch._C._len_torch_dispatch_stack() == 0
    loop.step()
    memlog.finish()
    assert [trace.step for trace in traces(session)] == [0]


def test_a_window_stays_shut_where_the_user_has_a_mode() -> None:
    loop = Loop()
    session = memlog.init("local", layers=True)
    with Users() as mode:
        loop.step()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is mode
    loop.step()
    loop.step()
    memlog.finish()
    (trace,) = traces(session)
    assert trace.step >= 1
    assert trace.skipped >= 1


def test_a_step_that_fails_midway_is_reported() -> None:
    loop = Loop()

    def train() -> None:
        loop.model(torch.ones(512, 64)).sum()
        raise ValueError("my own")

    session = memlog.init("local", layers=True)
    with pytest.raises(ValueError, match="my own"), session:
        train()
    (trace,) = traces(session)
    assert trace.step is None
    assert trace.at_peak["activations"] > 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_trace_beyond_its_limit_covers_a_part_of_the_step_and_says_so(runs: Path) -> None:
    """The budget allows 3 ms for the first two traces."""
    loop = Loop()
    session = memlog.init("local", model=loop.model, layers=True, budget=3e-4)
    for _ in range(30):
        loop.step()
    memlog.finish()
    (trace,) = traces(session)
    assert (trace.step, trace.exact) == (0, False)
    assert not internals.mode_stack()
    (run,) = list_runs(runs)
    result = read_worst_step(run).trace.result
    assert result.exactness == "lower bound"
    assert CUT in result.unseen
    assert trace.cut
    advice = output_of("advise", run.id)
    assert f"step 0: at least {format_bytes(result.peak)} at the peak" in advice
    assert "held at the peak, at least" in advice
    assert CUT.replace("`", "") in advice
    assert "No change that memlog can predict" not in advice


def test_a_step_that_is_asked_for_is_traced_to_its_end() -> None:
    loop = Loop()
    session = memlog.init("local", model=loop.model, layers=True, budget=3e-4)
    loop.step()
    session.snapshot()
    for _ in range(3):
        loop.step()
    memlog.finish()
    assert [(trace.step, trace.exact) for trace in traces(session)] == [(0, False), (1, True)]


def test_loading_a_batch_is_part_of_a_traced_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of loading counts as part of the traced step's cost."""
    from memlog.tracer.schedule.budget import Budget

    durations: list[float] = []
    tell = Budget.traced_step

    def traced_step(self: Budget, seconds: float, own: float, steps: int, **further: Any) -> None:
        durations.append(seconds)
        tell(self, seconds, own, steps, **further)

    monkeypatch.setattr(Budget, "traced_step", traced_step)
    loop = Loop()
    session = memlog.init("local", layers=True)
    loop.step()
    session.snapshot()
    time.sleep(0.5)
    loop.step()
    memlog.finish()
    assert durations[1] >= 0.5
