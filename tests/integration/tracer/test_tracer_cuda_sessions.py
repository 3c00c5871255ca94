"""Traces of a session on a device: beside the user's own memory history, other traces, and other devices."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.events import traces

import memlog
from memlog import MemoryTracer
from memlog.tracer.schedule.budget import SPACING

torch: Any = pytest.importorskip("torch")

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runs")]

DEVICE = "cuda:0"


class Training:
    def __init__(self) -> None:
        layers = [torch.nn.Linear(256, 256) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).to(DEVICE)
        self.batch = torch.ones(64, 256, device=DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_session_does_not_read_the_users_history(caplog: pytest.LogCaptureFixture) -> None:
    """torch returns the whole history with its stacks, which takes seconds in each traced step."""
    training = Training()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        with caplog.at_level(logging.WARNING, logger="memlog"):
            session = memlog.init("local", model=training.model, layers=True)
            for _ in range(5):
                training.step()
            memlog.finish()
        assert torch._C._cuda_isHistoryEnabled()
        assert torch.cuda.memory._get_memory_metadata() == ""
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found = traces(session)
    assert [(trace.engine, trace.exact) for trace in found] == [("sampler", False)] * 2
    assert all(trace.peak for trace in found)
    [said] = [text for text in caplog.messages if "lower bounds" in text]
    assert "memory history of its own" in said


def test_a_sessions_trace_names_its_device() -> None:
    training = Training()
    session = memlog.init("local", model=training.model, layers=True)
    for _ in range(3):
        training.step()
    memlog.finish()
    first, second = traces(session)
    assert (first.device, first.engine, first.exact) == ("cuda0", "native", True)
    assert second.at_peak["optimizer state"] > 2 * 4 * 256 * 256 * 4


def test_a_tracer_and_a_session_do_not_mistake_each_others_notes() -> None:
    training = Training()
    for _ in range(2):
        training.step()
    alone = MemoryTracer()
    with alone.trace(training.model):
        training.step()

    session = memlog.init("local", model=training.model, layers=True)
    outer, inner = MemoryTracer(), MemoryTracer()
    with outer.trace(training.model), inner.trace(training.model):
        training.step()
    memlog.finish()
    assert {figures.path: figures.allocated for figures in outer.result.layers} == {
        figures.path: figures.allocated for figures in alone.result.layers
    }
    assert (outer.result.engine, inner.result.engine) == ("native", "sampler")
    assert "another trace of memlog" in inner.result.why
    assert [trace.engine for trace in traces(session)] == ["sampler"]
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
def test_a_model_inside_linearize_is_no_internal_error() -> None:
    """The tensors there have a size and a device, and no address."""
    training = Training()
    session = memlog.init("local", layers=True)
    for _ in range(3):
        torch.func.linearize(lambda batch: training.model(batch).sin(), training.batch)
        training.step()
    memlog.finish()
    assert not session.health.faults


def test_a_history_that_the_program_turns_on_in_a_traced_step_is_its_own() -> None:
    """memlog neither reads its stacks, which takes seconds, nor turns it off with its own history."""
    training = Training()
    session = memlog.init("local", layers=True, budget=1.0)
    training.model(training.batch).square().mean().backward()
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        for _ in range(SPACING):  # another step is traced that many steps later
            training.optimizer.step()
            training.step()
        memlog.finish()
        assert torch._C._cuda_isHistoryEnabled()
        assert torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert not session.health.faults
    assert session.health.dropped["trace_skipped"] == 1
    assert {trace.engine for trace in traces(session)} == {"sampler"}


TWO_DEVICES = """
    import json
    import torch
    from memlog import MemoryTracer

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.small = torch.nn.Linear(64, 512, device="cuda:0")
            self.large = torch.nn.Linear(512, 512, device="cuda:1")

        def forward(self, batch):
            return self.large(self.small(batch).to("cuda:1"))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(256, 64, device="cuda:0")).sum().backward()
        optimizer.step()

    step()
    found = []
    for device in (None, "cuda:0", "cuda:1"):
        tracer = MemoryTracer(device=device)
        with tracer.trace(model):
            step()
        result = tracer.result
        [peak] = {torch.cuda.memory_allocated(result.device) - result.end}
        told = [text for text in result.unseen if "also has parameters" in text]
        layers = {layer.path: layer.allocated for layer in result.layers}
        found.append([result.device, result.categories, peak, told, layers])
    print(json.dumps(found))
"""


def test_a_model_on_two_devices_is_traced_on_the_one_that_holds_most_of_it(tmp_path: Path) -> None:
    output, errors = child.start(
        TWO_DEVICES, tmp_path, fork=False, FAKE_CUDA_DEVICES="2"
    ).communicate(timeout=120)
    assert not errors
    default, first, second = json.loads(output)
    assert [default[0], first[0], second[0]] == ["cuda:1", "cuda:0", "cuda:1"]
    assert [found[2] for found in (default, first, second)] == [0, 0, 0]
    small, large = 65 * 512 * 4, 513 * 512 * 4
    assert first[1]["parameters"] == pytest.approx(small, rel=0.01)
    assert second[1]["parameters"] == pytest.approx(large, rel=0.01)
    assert first[1]["optimizer state"] == pytest.approx(2 * small, rel=0.05)
    assert second[1]["optimizer state"] == pytest.approx(2 * large, rel=0.05)
    assert "cuda:1. This trace is of cuda:0 alone" in first[3][0]
    assert "cuda:0. This trace is of cuda:1 alone" in second[3][0]
    assert first[4]["small"]
    assert not first[4].get("large")
