"""The tracer that memlog takes over from, by its document: its examples, run as they stand there.

On the CPU, so without ``.cuda()``; the import names memlog.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import speedscope
from torch import nn

import memlog
from memlog import LayerMemoryStats, MemoryEvent, MemoryTracer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


@pytest.fixture
def input_tensor() -> torch.Tensor:
    return torch.randn(32, 64)


@pytest.mark.seed(171, 177, 183, 198, 207, 210, 211, 213, 222, 233, 240)
def test_the_quick_start_and_the_exports(
    model: Any, input_tensor: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer = MemoryTracer(max_events=10000)
    with tracer.trace(model):
        output = model(input_tensor)
    tracer.print_summary()
    tracer.export_flame_graph("memory_profile.json")
    tracer.export_timeline("memory_timeline.json")

    assert output.shape == (32, 8)
    assert "Sequential" in capsys.readouterr().out
    speedscope.check(json.loads((folder / "memory_profile.json").read_bytes()))
    with open("memory_timeline.json") as f:  # noqa: PTH123 - the document's own line
        data = json.load(f)
    events, layer_stats, summary = data["events"], data["layer_stats"], data["summary"]
    assert events[0]["timestamp"] < 1
    assert layer_stats["0"]["peak_allocated"] <= summary["peak"]


@pytest.mark.seed(178, 179, 208, 212)
def test_layers_are_listed_in_mb_and_sorted_by_their_peak(
    model: Any, input_tensor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer = MemoryTracer()
    with tracer.trace(model):
        model(input_tensor)
    layer_stats = tracer.get_layer_stats()
    for name, stats in layer_stats.items():
        print(f"{name}: {stats.peak_allocated / (1024**2):.2f} MB")  # type: ignore[operator] # known on the CPU
    peak_memory = tracer.get_peak_memory_per_layer()
    sorted_layers = sorted(peak_memory.items(), key=lambda x: x[1], reverse=True)
    print("Top 5 memory-intensive layers:")
    for name, peak_bytes in sorted_layers[:5]:
        print(f"  {name}: {peak_bytes / (1024**2):.2f} MB")

    assert set(layer_stats) == {"Sequential", "0", "1", "2"}
    assert sorted_layers[0][1] == peak_memory["Sequential"] == tracer.result.peak
    assert capsys.readouterr().out.count(" MB\n") == 8


@pytest.mark.seed(173, 174, 175, 176, 217, 225)
def test_the_constructor_takes_what_it_took() -> None:
    parameters = inspect.signature(MemoryTracer).parameters
    assert list(parameters)[:3] == ["max_events", "device", "enable_fragmentation_tracking"]
    assert parameters["max_events"].default == 100000
    assert parameters["enable_fragmentation_tracking"].default is True
    MemoryTracer(10, "cpu", False)


@pytest.mark.seed(184, 188, 190)
def test_the_records_have_their_fields() -> None:
    assert [field.name for field in dataclasses.fields(LayerMemoryStats)] == [
        "layer_name",
        "peak_allocated",
        "peak_reserved",
        "total_allocations",
        "total_deallocations",
        "avg_fragmentation",
        "duration_ms",
    ]
    assert [field.name for field in dataclasses.fields(MemoryEvent)] == [
        "timestamp",
        "event_type",
        "size_bytes",
        "layer_name",
        "allocated_bytes",
        "reserved_bytes",
        "fragmentation_ratio",
    ]


@pytest.mark.seed(185, 186, 187, 189, 191)
def test_a_layers_figures_are_what_they_are_called(model: Any) -> None:
    tracer = MemoryTracer()
    with tracer.trace(model), torch.no_grad():
        model(torch.ones(32, 64))
    stats = tracer.get_layer_stats()["0"]
    # Without a graph its one result goes as soon as the next layer has run.
    assert (stats.total_allocations, stats.total_deallocations) == (1, 1)
    assert 0 < stats.duration_ms < tracer.get_layer_stats()["Sequential"].duration_ms
    made = [e for e in tracer.events if e.event_type == "alloc" and e.size_bytes == 32 * 256 * 4]
    assert [event.layer_name for event in made] == ["0", "1"]
    assert 0 < made[0].timestamp < made[1].timestamp < tracer.result.duration_ms / 1e3


@pytest.mark.seed(180, 196, 205)
def test_fragmentation_on_the_cpu_is_unknown_and_says_why(model: Any, input_tensor: Any) -> None:
    tracer = MemoryTracer(enable_fragmentation_tracking=True)
    with tracer.trace(model):
        for batch_size in [4, 8, 16, 8, 4]:
            _ = model(input_tensor[:batch_size])
    assert set(tracer.get_fragmentation_stats().values()) <= {None}
    assert tracer.result.fragmentation is None
    assert "nothing is reserved" in (tracer.result.fragmentation_reason or "")


@pytest.mark.seed(226)
def test_a_model_without_named_modules_has_figures_all_the_same() -> None:
    tracer = MemoryTracer()
    with tracer.trace():
        torch.zeros(1000)
    assert tracer.get_layer_stats() == {}
    assert tracer.result.peak == 4000
    with tracer.trace(nn.Linear(4, 4)) as again:
        pass
    assert again.result.peak == 4 * (16 + 4)


def test_all_of_it_is_memlogs_public_face() -> None:
    assert {"MemoryTracer", "LayerMemoryStats", "MemoryEvent"} <= set(memlog.__all__)
