"""The tracer as its document has it, line by line, with the old import's one changed line.

``pytest tests/test_memory_tracer.py -v`` is the document's own command, and these are its six subjects. On a
machine without a GPU everything runs on the CPU, where nothing is reserved. What the document does not have
is in ``tests/unit/tracer`` and ``tests/integration/tracer``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import speedscope
from torch import Tensor, nn

import memlog
from memlog import ConfigurationError
from memlog.compat.gpu_optimizer import LayerMemoryStats, MemoryEvent, MemoryTracer
from memlog.tracer.user_scopes import LISTENERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 1024**2
BATCH = 32
WIDTH = 64


class Net(nn.Module):
    """Attention, convolution and a nested block: everything has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.head = nn.Linear(4 * WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        out: Tensor = self.head(self.block(x))
        return out


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().to(DEVICE)


@pytest.fixture(scope="module")
def input_tensor() -> Tensor:
    return torch.randn(BATCH, 16, WIDTH, device=DEVICE)


@pytest.fixture(scope="module")
def tracer(model: nn.Module, input_tensor: Tensor) -> MemoryTracer:
    tracer = MemoryTracer(max_events=10000)
    with tracer.trace(model):
        output = model(input_tensor)
        output.sum().backward()
    model.zero_grad()
    return tracer


# The face.


@pytest.mark.seed(171)
def test_the_old_imports_are_the_tracers_own() -> None:
    assert MemoryTracer is memlog.MemoryTracer
    assert MemoryEvent is memlog.MemoryEvent
    assert LayerMemoryStats is memlog.LayerMemoryStats


@pytest.mark.seed(173, 217)
def test_the_arguments_and_their_defaults() -> None:
    parameters = inspect.signature(MemoryTracer).parameters
    assert list(parameters)[:3] == ["max_events", "device", "enable_fragmentation_tracking"]
    assert parameters["max_events"].default == 100_000
    assert parameters["enable_fragmentation_tracking"].default is True
    assert parameters["device"].default is None  # where the model is, so that CPUs do too
    for events in (10_000, 1_000_000):
        MemoryTracer(max_events=events, device="cpu", enable_fragmentation_tracking=False)


@pytest.mark.seed(184, 188)
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


@pytest.mark.seed(197, 198, 207, 210, 222, 223, 233, 248, 250)
def test_the_quick_start(
    model: nn.Module, input_tensor: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer = MemoryTracer(max_events=10000)
    with tracer.trace(model):
        output = model(input_tensor)
    tracer.print_summary()
    tracer.export_flame_graph(str(tmp_path / "memory_profile.json"))
    tracer.export_timeline(str(tmp_path / "memory_timeline.json"))
    assert output.shape == (BATCH, 16, 8)
    assert "Peak " in capsys.readouterr().out
    speedscope.check(json.loads((tmp_path / "memory_profile.json").read_bytes()))
    assert json.loads((tmp_path / "memory_timeline.json").read_bytes())["events"]


# Event recording.


@pytest.mark.seed(189, 190, 191, 193, 234)
def test_events_are_recorded_with_sizes_and_running_totals(tracer: MemoryTracer) -> None:
    events = tracer.events
    assert {"alloc", "free", "layer_enter", "layer_exit"} <= {e.event_type for e in events}
    assert all(e.size_bytes > 0 for e in events if e.event_type == "alloc")
    times = [event.timestamp for event in events]
    assert times[0] >= 0
    assert times == sorted(times)
    assert times[-1] < 60  # seconds
    live = tracer.result.before or 0
    if DEVICE == "cpu":  # on a GPU readings of the allocator's own lie between
        for event in events:
            sign = {"alloc": 1, "free": -1}.get(event.event_type, 0)
            live += sign * event.size_bytes
            assert event.allocated_bytes == live


@pytest.mark.seed(199)
def test_threads_with_a_tracer_each_record_only_their_own() -> None:
    sizes, found = (1000, 3000), dict[int, set[int]]()
    together = threading.Barrier(len(sizes))

    def work(size: int) -> None:
        tracer = MemoryTracer(device="cpu")
        with tracer.trace():
            together.wait(timeout=60)
            kept = [torch.ones(size) for _ in range(50)]
            together.wait(timeout=60)
        found[size] = {e.size_bytes for e in tracer.events if e.event_type == "alloc"}
        del kept

    threads = [threading.Thread(target=work, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {size: {4 * size} for size in sizes}


# Layer tracking.


@pytest.mark.seed(178, 194, 208, 226, 235, 244)
def test_every_named_module_has_statistics(tracer: MemoryTracer, model: nn.Module) -> None:
    layer_stats = tracer.get_layer_stats()
    for name, _ in model.named_modules():
        if name:
            assert layer_stats[name].layer_name == name
    assert layer_stats["Net"].layer_name == "Net"  # the model itself, whose name is ''
    called = {name: stats for name, stats in layer_stats.items() if stats.peak_allocated}
    # Attention reads its last layer's weights without calling it.
    assert set(layer_stats) - set(called) == {"attention.out_proj"}
    for name, stats in called.items():
        print(f"{name}: {stats.peak_allocated / (1024**2):.2f} MB")


@pytest.mark.seed(185, 186, 187)
def test_allocations_and_frees_are_counted_and_time_adds_up(tracer: MemoryTracer) -> None:
    stats = tracer.get_layer_stats()
    head = tracer.get_layer_figures("head")
    counted = sum(e.event_type == "alloc" and e.layer_name == "head" for e in tracer.events)
    assert stats["head"].total_allocations == counted > 1
    freed = sum(e.event_type == "free" and e.layer_name == "head" for e in tracer.events)
    assert stats["head"].total_deallocations == freed > 0
    assert {phase.phase for phase in head.phases} == {"forward", "backward"}
    whole, part = (tracer.get_layer_figures(name).phase("forward") for name in ("block", "block.0"))
    assert whole is not None
    assert part is not None
    assert whole.time_ms >= part.time_ms > 0
    assert stats["block.0"].duration_ms > part.time_ms  # and backward


@pytest.mark.seed(179, 208, 212)
def test_the_most_memory_intensive_layers(
    tracer: MemoryTracer, capsys: pytest.CaptureFixture[str]
) -> None:
    peak_memory = tracer.get_peak_memory_per_layer()
    sorted_layers = sorted(peak_memory.items(), key=lambda x: x[1], reverse=True)
    print("Top 5 memory-intensive layers:")
    for name, peak_bytes in sorted_layers[:5]:
        print(f"  {name}: {peak_bytes / (1024**2):.2f} MB")
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert all(isinstance(peak, int) for peak in peak_memory.values())
    assert sorted_layers[0][1] == tracer.result.peak
    assert sorted_layers[-1][1] > 0


@pytest.mark.seed(195, 202, 206, 264)
def test_hooks_are_there_inside_the_block_alone(model: nn.Module, input_tensor: Tensor) -> None:
    from torch.nn.modules import module as hooks

    def installed() -> tuple[int, int, int]:
        tables = hooks._global_forward_pre_hooks, hooks._global_forward_hooks
        return *map(len, tables), len(LISTENERS.holders)

    before, tracer = installed(), MemoryTracer()
    with tracer.trace(model):
        assert all(now > then for now, then in zip(installed(), before, strict=True))
        model(input_tensor)
    assert installed() == before
    with pytest.raises(ZeroDivisionError), tracer.trace(model):
        raise ZeroDivisionError
    assert installed() == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# Fragmentation analysis.


@pytest.mark.seed(180, 196, 209, 236, 246)
def test_fragmentation_is_a_share_or_unknown_with_its_reason(model: nn.Module) -> None:
    tracer = MemoryTracer(enable_fragmentation_tracking=True)
    with tracer.trace(model):
        for batch_size in [4, 8, 16, 8, 4]:
            _ = model(torch.randn(batch_size, 16, WIDTH, device=DEVICE))
    frag_stats = tracer.get_fragmentation_stats()
    assert "attention" in frag_stats
    if DEVICE == "cpu":  # no allocator that holds anything in reserve: unknown, never 0
        assert set(frag_stats.values()) == {None}
        assert tracer.result.fragmentation is None
        assert "nothing is reserved" in (tracer.result.fragmentation_reason or "")
        return
    for layer, frag_ratio in frag_stats.items():
        assert frag_ratio is not None
        assert 0 <= frag_ratio <= 1
        print(f"{layer}: {frag_ratio:.1%} fragmentation")


# Export functionality.


@pytest.mark.seed(181, 197, 237, 240, 241, 242, 243)
def test_the_flame_graph_has_time_order_weights_and_nesting(
    tracer: MemoryTracer, tmp_path: Path
) -> None:
    document = json.loads(tracer.export_flame_graph(tmp_path / "p.json").read_bytes())
    speedscope.check(document)
    names = [frame["name"] for frame in document["shared"]["frames"]]
    peak, in_order, *_ = document["profiles"]
    assert {peak["unit"], in_order["unit"]} == {"bytes"}
    assert sum(peak["weights"]) == tracer.result.peak  # "Left Heavy": by what layers hold
    stacks = [[names[frame] for frame in sample] for sample in in_order["samples"]]
    nested = [stack for stack in stacks if "block" in stack and "block.0" in stack]
    assert nested, "no stack deeper than one frame: 'Sandwich' would show no callers"
    first_seen = [next(i for i, s in enumerate(stacks) if n in s) for n in ("attention", "head")]
    assert first_seen == sorted(first_seen)  # "Time Order"


@pytest.mark.seed(182, 192, 198, 211, 213, 237)
def test_the_timeline_is_loaded_with_json(tracer: MemoryTracer, tmp_path: Path) -> None:
    tracer.export_timeline(tmp_path / "memory_timeline.json")
    with open(tmp_path / "memory_timeline.json") as f:  # noqa: PTH123 - the document's own line
        data = json.load(f)
    events = data["events"]
    layer_stats = data["layer_stats"]
    summary = data["summary"]
    assert len(events) == len(tracer.events)
    assert set(layer_stats) == set(tracer.get_layer_stats())
    assert summary["peak"] == tracer.result.peak


@pytest.mark.seed(214)
def test_the_timeline_is_plotted_with_matplotlib(tracer: MemoryTracer, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    data = json.loads(tracer.export_timeline(tmp_path / "t.json").read_bytes())
    events = data["events"]
    timestamps = [e["timestamp"] for e in events]
    allocated = [e["allocated_bytes"] / (1024**3) for e in events]
    [line] = plt.plot(timestamps, allocated)
    plt.xlabel("Time (s)")
    plt.ylabel("Allocated Memory (GB)")
    plt.title("Memory Usage Over Time")
    plt.savefig(tmp_path / "plot.png")
    plt.close()
    assert max(line.get_ydata()) * 1024**3 == tracer.result.peak
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.seed(183)
def test_the_summary_names_peak_categories_and_layers(
    tracer: MemoryTracer, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer.print_summary()
    printed = capsys.readouterr().out
    assert printed.startswith("Memory trace on ")
    assert "At the peak: " in printed
    assert "block.0" in printed
    assert "ragmentation" in printed


# Performance overhead.


@pytest.mark.seed(216, 238)
def test_the_documents_recipe_for_the_overhead_runs_and_costs_no_memory_afterwards(
    model: nn.Module, input_tensor: Tensor
) -> None:
    """A hundred traces of a step each, whose times are printed: machines differ, so none is asserted."""
    import statistics
    import time

    tracer, bare, traced = MemoryTracer(), [], []
    with torch.no_grad():
        for _ in range(100):
            start = time.perf_counter()
            _ = model(input_tensor)
            bare.append(time.perf_counter() - start)
            with tracer.trace(model):
                start = time.perf_counter()
                _ = model(input_tensor)
                traced.append(time.perf_counter() - start)
    overhead_pct = (statistics.median(traced) / statistics.median(bare) - 1) * 100
    print(f"Overhead: {overhead_pct:.2f}%")
    assert not tracer.health.faults
    assert tracer.result.events < 200  # the last trace alone is held
    assert LISTENERS.holders == ()


@pytest.mark.seed(174, 200, 218, 224)
def test_events_are_few_bytes_and_bounded_and_totals_go_on(
    model: nn.Module, input_tensor: Tensor
) -> None:
    whole, cut = MemoryTracer(), MemoryTracer(max_events=20)
    for tracer in (whole, cut):
        with tracer.trace(model):
            model(input_tensor)
    assert len(cut.events) <= 20
    assert len(cut.recording.events) <= 20 * 32
    assert sys.getsizeof(whole.recording.events) / whole.result.kept_events < 120
    assert cut.result.truncated
    assert (cut.result.peak, cut.result.events) == (whole.result.peak, whole.result.events)


# Edge cases.


@pytest.mark.seed(177, 239)
def test_edge_cases(input_tensor: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="nothing has been traced yet"):
        MemoryTracer().get_layer_stats()
    empty = MemoryTracer()
    with empty.trace(nn.Identity()):
        pass
    assert empty.result.peak == 0
    assert all(stats.total_allocations == 0 for stats in empty.get_layer_stats().values())
    outer, inner = MemoryTracer(device="cpu"), MemoryTracer(device="cpu")
    with outer.trace():
        with inner.trace():
            kept = [torch.ones(1000)]
        kept.append(torch.ones(500))  # the outer one goes on
    assert (outer.result.peak, inner.result.peak) == (6000, 4000)


@pytest.mark.seed(139, 252, 256)
def test_what_a_leak_leaves_behind_is_named_with_its_owner(
    model: nn.Module, input_tensor: Tensor
) -> None:
    """An undetached loss, kept: it holds the whole graph, step after step."""
    losses: list[Any] = []
    grown = []
    for _ in range(3):
        tracer = MemoryTracer()
        with tracer.trace(model):
            losses.append(model(input_tensor).square().mean())
        grown.append((tracer.result.end or 0) - (tracer.result.before or 0))
    kept = tracer.get_layer_figures("block.0").phase("forward")
    assert grown[0] == grown[1] == grown[2] > MIB
    assert kept is not None
    assert (kept.kept or 0) == 4 * BATCH * 16 * 4 * WIDTH
    losses.clear()
    with tracer.trace(model):
        losses.append(model(input_tensor).square().mean().item())
    assert tracer.result.end == tracer.result.before
