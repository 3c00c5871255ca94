"""Arguments that a tracer refuses, and its result if it can't trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import speedscope
from support.clean_torch import clean, hooks, nothing_stays_behind  # noqa: F401 - a fixture
from support.models import mlp
from torch import nn

from memlog import ConfigurationError, MemoryTracer
from memlog.events import Trace
from memlog.tracer.schedule.kept_trace import trace_event

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")
BATCH = torch.ones(4, 64)


@pytest.mark.seed(175, 223)
def test_devices_that_are_not_there_are_one_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="not a torch device"):
        MemoryTracer(device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="this machine has no CUDA device"):
            MemoryTracer(device="cuda:0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"max_events": events}, "above 0") for events in (0, "5", None, 1.5, True)),
        ({"engine": "dispach"}, "one of auto"),
    ],
)
def test_wrong_arguments_are_said_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MemoryTracer(**arguments)


def test_an_engine_that_cannot_trace_the_device_is_an_error() -> None:
    with (
        pytest.raises(ConfigurationError, match="can't trace cpu"),
        MemoryTracer(engine="native").trace(mlp()),
    ):
        raise AssertionError("the block must not run")


def test_what_the_sampler_does_not_know_is_unknown_and_no_nought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer, model = MemoryTracer(engine="sampler"), mlp()
    with tracer.trace(model):
        model(BATCH).sum().backward()
    assert (tracer.result.peak, tracer.result.exactness) == (None, "none")
    assert tracer.get_peak_memory_per_layer() == {}
    stats = tracer.get_layer_stats()["2"]
    assert (stats.total_allocations, stats.total_deallocations) == (None, None)
    assert (stats.peak_allocated, stats.avg_fragmentation) == (None, None)
    assert stats.duration_ms > 0
    layer = tracer.get_layer_figures("2")
    assert [phase.calls for phase in layer.phases] == [1, 1]
    assert (layer.allocated, layer.at_peak, layer.at_peak_total) == (None, None, None)
    for phase in layer.phases:
        assert (phase.allocations, phase.allocated, phase.frees) == (None, None, None)
        assert (phase.peak, phase.kept) == (None, None)
    assert tracer.result.unattributed == {}

    tracer.print_summary()
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("2 "))
    assert row.split()[1:5] == ["unknown"] * 4

    document = json.loads(tracer.export_timeline(tmp_path / "timeline.json").read_bytes())
    assert document["layer_stats"]["2"]["total_allocations"] is None
    speedscope.check(json.loads(tracer.export_flame_graph(tmp_path / "graph.json").read_bytes()))

    encoded = msgspec.json.encode(trace_event(tracer.result, 1))
    decoded = msgspec.json.decode(encoded, type=Trace).layers[0]
    assert (decoded.at_peak, decoded.peak, decoded.allocated, decoded.kept) == (None,) * 4


def test_an_old_torch_gets_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    from memlog.torchside import internals
    from memlog.tracer import window

    monkeypatch.setitem(internals.DISPATCH_NEEDS, "torch._C._current_autograd_node", None)
    choice = window.choose_engine(torch.device("cpu"), "auto", compiled=False)
    assert choice.engine == "sampler"
    assert "lacks torch._C._current_autograd_node" in choice.why


def test_an_error_inside_the_tracer_never_reaches_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from memlog.tracer.engines import live_storages

    def fail(*_: Any) -> None:
        raise RuntimeError("memlog's own")

    tracer, model = MemoryTracer(), mlp()
    with monkeypatch.context() as broken:
        broken.setattr(live_storages.LiveStorages, "track", fail)
        with tracer.trace(model):
            model(BATCH).sum().backward()
    assert tracer.health.faults["recording an operation: RuntimeError"] > 3
    assert tracer.result.dropped["errors inside the tracer"] > 3
    assert caplog.text.count("training goes on") == 1


@pytest.mark.parametrize("model", ["model", len, [nn.Linear(2, 2)]])
def test_what_is_no_module_is_one_clear_error(model: Any) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"give a torch\.nn\.Module"),
        MemoryTracer().trace(model),
    ):
        raise AssertionError("the block must not run")


def test_a_trace_that_cannot_begin_leaves_no_older_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from memlog.tracer.engines import live_storages

    def fail(*_: Any) -> None:
        raise RuntimeError("memlog's own")

    tracer, model = MemoryTracer(), mlp()
    with tracer.trace(model):
        model(BATCH)
    monkeypatch.setattr(live_storages.ModelTensors, "add_new_roots", fail)
    with tracer.trace(model):
        model(BATCH)
    assert tracer.health.faults["beginning a trace: RuntimeError"] == 1
    with pytest.raises(ConfigurationError, match="could not begin"):
        tracer.print_summary()
    with pytest.raises(ConfigurationError, match="could not begin"):
        tracer.get_layer_stats()
