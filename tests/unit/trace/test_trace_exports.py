"""Exported traces, read as other programs read them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import speedscope
from support.models import GPT, text

from memlog import ConfigurationError, MemoryTracer
from memlog._internal.terminal import format_bytes
from memlog.artifacts.snapshots import read_snapshot
from memlog.events import Trace
from memlog.trace import exporters
from memlog.tracer.schedule.kept_trace import trace_event


def traced(steps: int = 1, **arguments: Any) -> MemoryTracer:
    torch.manual_seed(0)
    model = GPT(checkpointing="not reentrant")
    optimizer = torch.optim.Adam(model.parameters())
    tracer = MemoryTracer(**arguments)
    with tracer.trace(model):
        for _ in range(steps):
            model(text()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracer


@pytest.fixture(scope="module")
def tracer() -> MemoryTracer:
    return traced()


@pytest.mark.seed(181, 242)
def test_the_flame_graph_is_valid_and_holds_the_peak(tracer: MemoryTracer, tmp_path: Path) -> None:
    path = tracer.export_flame_graph(tmp_path / "a.speedscope.json")
    document = json.loads(path.read_bytes())
    speedscope.check(document)

    at_peak, in_order, milliseconds = document["profiles"]
    units = [profile["unit"] for profile in document["profiles"]]
    assert units == ["bytes", "bytes", "milliseconds"]
    assert at_peak["endValue"] == tracer.result.peak
    stacks = [stack for stack, _ in speedscope.stacks(document, 0)]
    assert {f"[{category}]" for category in tracer.result.categories} == {
        stack[-1] for stack in stacks
    }
    parents = ("GPT", "blocks", "blocks.0", "blocks.0.mlp")
    assert (*parents, "blocks.0.mlp.0", "[parameters]") in stacks

    roots = {stack[0] for stack, _ in speedscope.stacks(document, 1)}
    assert roots == {"forward", "backward", "recompute", "optimizer"}
    assert in_order["endValue"] == sum(layer.allocated for layer in tracer.result.layers)
    assert milliseconds["endValue"] == pytest.approx(tracer.result.duration_ms)


def test_its_title_tells_the_model_the_step_and_the_peak(tracer: MemoryTracer) -> None:
    document = exporters.flame_graph(tracer.recording, "step 160")
    title = f"GPT, step 160: {format_bytes(tracer.result.peak)} at the peak"
    assert document["name"] == document["profiles"][0]["name"] == title
    assert document["activeProfileIndex"] == 0
    bound = msgspec.structs.replace(tracer.result, exactness="lower bound", device="cuda:1")
    partial = msgspec.structs.replace(tracer.recording, result=bound)
    title = f"GPT: at least {format_bytes(bound.peak)} on cuda:1"
    assert title in exporters.flame_graph(partial)["name"]
    times_only = msgspec.structs.replace(bound, peak=None, shares=(), categories={})
    without = msgspec.structs.replace(tracer.recording, result=times_only)
    assert exporters.flame_graph(without, "step 2")["name"] == "GPT, step 2"


def test_categories_have_clearly_different_colours(tracer: MemoryTracer) -> None:
    """Speedscope colours a frame by its position among the profile's frames, sorted by file and name."""
    document = exporters.flame_graph(tracer.recording)
    at_peak = document["profiles"][0]
    used = {frame for sample in at_peak["samples"] for frame in sample}
    frames = [document["shared"]["frames"][number] for number in sorted(used)]
    ordered = sorted(frames, key=lambda frame: frame.get("file", "") + frame["name"])
    places = [n for n, frame in enumerate(ordered) if frame["name"].startswith("[")]
    assert len(places) == len(tracer.result.categories) >= 4
    circle = [*places, places[0] + len(ordered)]
    apart = [after - before for before, after in itertools.pairwise(circle)]
    assert min(apart) >= len(ordered) // len(places) - 1
    kinds = {frame["name"]: frame["file"].strip("\N{WORD JOINER}") for frame in frames}
    assert (kinds["blocks.0.mlp.0"], kinds["[activations]"]) == ("Linear", "category")


def test_a_cut_trace_makes_a_valid_flame_graph_whose_bytes_are_complete() -> None:
    cut = traced(max_events=150)
    document = exporters.flame_graph(cut.recording)
    speedscope.check(document)
    assert document["profiles"][0]["endValue"] == cut.result.peak
    allocated = sum(layer.allocated for layer in cut.result.layers)
    assert document["profiles"][1]["endValue"] == allocated


def test_a_trace_of_nothing_makes_a_valid_flame_graph() -> None:
    for engine in ("dispatch", "sampler"):
        tracer = MemoryTracer(engine=engine)  # type: ignore[arg-type] # both are names of engines
        with tracer.trace():
            pass
        speedscope.check(exporters.flame_graph(tracer.recording))
        json.dumps(exporters.timeline(tracer.recording), allow_nan=False)


@pytest.mark.slow
def test_a_long_trace_stays_below_the_number_of_samples(tracer: MemoryTracer) -> None:
    whole = tracer.recording
    repeated = msgspec.structs.replace(whole, events=whole.events * 400)
    assert len(repeated.events) // 32 > 300_000
    document = exporters.flame_graph(repeated)
    speedscope.check(document)
    assert speedscope.entries(document) <= 200_000


@pytest.mark.seed(192)
def test_the_timeline_has_the_seeds_keys(tracer: MemoryTracer, tmp_path: Path) -> None:
    path = tracer.export_timeline(tmp_path / "timeline.json.gz")
    document = json.loads(gzip.decompress(path.read_bytes()))

    assert set(document) >= {"events", "layer_stats", "summary"}
    assert set(document["events"][0]) == {
        "timestamp",
        "event_type",
        "size_bytes",
        "layer_name",
        "allocated_bytes",
        "reserved_bytes",
        "fragmentation_ratio",
    }
    kinds = {event["event_type"] for event in document["events"]}
    assert kinds == {"alloc", "free", "layer_enter", "layer_exit"}
    assert max(event["allocated_bytes"] for event in document["events"]) == tracer.result.peak
    assert document["events"][-1]["allocated_bytes"] == tracer.result.end
    assert document["layer_stats"]["head"]["layer_name"] == "head"
    assert document["summary"]["peak"] == tracer.result.peak
    times = [event["timestamp"] for event in document["events"]]
    assert times == sorted(times)


def test_the_chrome_trace_has_layers_and_counters(tracer: MemoryTracer, tmp_path: Path) -> None:
    document = json.loads(tracer.export_trace(tmp_path / "trace.json").read_bytes())
    events = document["traceEvents"]
    opened: list[str] = []
    for event in events:
        if event["ph"] == "B":
            opened.append(event["name"])
        elif event["ph"] == "E":
            assert opened.pop() == event["name"]
    assert not opened
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert max(sum(counter.values()) for counter in counters) == tracer.result.peak
    assert min(min(counter.values()) for counter in counters) >= 0


@pytest.mark.seed(164)
def test_layers_lie_beside_the_profilers_operations(tmp_path: Path) -> None:
    model, tracer = GPT(), MemoryTracer()
    with torch.profiler.profile() as profile, tracer.trace(model):
        model(text()).sum().backward()
    profile.export_chrome_trace(str(tmp_path / "profiler.json"))

    path = tracer.export_trace(tmp_path / "both.json.gz", tmp_path / "profiler.json")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    operations = [event for event in events if event.get("name") == "aten::addmm"]
    begins = {
        event["name"]: event["ts"]
        for event in reversed(events)
        if event.get("pid") == "memlog" and event["ph"] == "B"
    }
    ends = max(e["ts"] for e in events if e.get("pid") == "memlog" and e["ph"] == "E")
    assert operations
    # The two clocks agree to within a millisecond.
    assert all(begins["GPT"] - 1000 < event["ts"] < ends + 1000 for event in operations)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"traceEvents": 3}', b"\x80\x04"])
def test_a_file_that_is_no_profiler_trace_is_refused(
    tracer: MemoryTracer, tmp_path: Path, content: bytes
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(content)
    with pytest.raises(ConfigurationError, match="export_chrome_trace"):
        tracer.export_trace(tmp_path / "out.json", wrong)
    assert not (tmp_path / "out.json").exists()


def test_the_snapshot_is_one_of_plain_types(tracer: MemoryTracer, tmp_path: Path) -> None:
    packed = tracer.export_snapshot(tmp_path / "s.pickle.gz").read_bytes()
    assert pickle.loads(gzip.decompress(packed))["segments"] == []  # noqa: S301 - just written
    path = tracer.export_snapshot(tmp_path / "snapshot.pickle")
    assert path.read_bytes()[:2] == b"\x80\x04", "the page reads no newer protocol"
    (history,) = read_snapshot(path)["device_traces"]

    live: dict[int, int] = {}
    peak = 0
    for entry in history:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_requested":
            assert live.pop(entry["addr"]) == entry["size"]
        peak = max(peak, sum(live.values()))
    assert peak == tracer.result.peak
    assert sum(live.values()) == tracer.result.end
    assert all(entry["frames"] for entry in history)


@pytest.mark.seed(135)
def test_torchs_own_reader_of_snapshots_reads_it(tracer: MemoryTracer) -> None:
    from torch.cuda import _memory_viz

    page = _memory_viz.trace(exporters.snapshot(tracer.recording))
    entries = exporters.snapshot(tracer.recording)["device_traces"][0]
    assert f"{len(entries)} entries" in page
    assert " = MEM[" in page


def test_files_appear_whole_or_not_at_all(
    tracer: MemoryTracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    old = tmp_path / "flame.json"
    old.write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tracer.export_flame_graph(old)
    with pytest.raises(TypeError):
        exporters.write_json({"no": object()}, old)
    assert [path.name for path in tmp_path.iterdir()] == ["flame.json"]
    assert old.read_text() == "old"


def test_equal_traces_make_equal_compressed_files(tracer: MemoryTracer, tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        exporters.write_json(exporters.timeline(tracer.recording), tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_folder_that_is_missing_is_one_clear_error(tracer: MemoryTracer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no folder"):
        tracer.export_timeline(tmp_path / "missing" / "a.json")


def test_the_summary_is_printed(tracer: MemoryTracer, capsys: pytest.CaptureFixture[str]) -> None:
    tracer.print_summary()
    printed = capsys.readouterr().out
    assert "engine dispatch" in printed
    assert "blocks.0.mlp.0" in printed
    assert "% of the bytes of forward and backward belong to a module" in printed
    assert max(map(len, printed.splitlines())) < 200


def test_the_event_of_a_trace_is_small_and_encodes(tracer: MemoryTracer) -> None:
    encoded = msgspec.json.encode(trace_event(tracer.result, 3))
    assert len(encoded) < 1500
    event = msgspec.json.decode(encoded, type=Trace)
    assert (event.step, event.peak) == (3, tracer.result.peak)
    assert sum(event.at_peak.values()) == event.peak
