"""The page beside a flame graph: the same figures, nothing loaded, nothing run."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from support import device_snapshots
from support.flamegraphs import document, evented, sampled
from support.models import GPT, text

from memlog import MemoryTracer
from memlog._internal.terminal import format_bytes
from memlog.trace import exporters


@pytest.fixture(scope="module")
def tracer() -> MemoryTracer:
    torch.manual_seed(0)
    model, tracer = GPT(), MemoryTracer()
    with tracer.trace(model):
        model(text()).sum().backward()
    return tracer


def test_it_tells_the_peak_its_categories_and_layers(tracer: MemoryTracer) -> None:
    page = exporters.flame_page(exporters.flame_graph(tracer.recording, "step 3"))
    assert page is not None
    peak = format_bytes(tracer.result.peak)
    assert f"<h1>GPT, step 3: {peak} at the peak</h1>" in page
    for category, size in tracer.result.categories.items():
        assert f"<code>{category}</code></td><td>{format_bytes(size)}</td>" in page
    assert 'title="blocks.0.mlp.0: ' in page
    assert len(page) < 100_000


def test_boxes_lie_in_their_parents_side_by_side(tracer: MemoryTracer) -> None:
    page = exporters.flame_page(exporters.flame_graph(tracer.recording))
    assert page is not None
    found = re.findall(r"left:([0-9.]+)%;width:([0-9.]+)%;top:([0-9]+)px", page)
    rows: dict[int, list[tuple[float, float]]] = {}
    for left, width, top in found:
        rows.setdefault(int(top), []).append((float(left), float(left) + float(width)))
    tolerance = 0.001
    above = [(0.0, 100.0)]
    for top in sorted(rows):
        boxes = sorted(rows[top])
        for box, following in itertools.pairwise(boxes):
            assert box[1] <= following[0] + tolerance
        for left, right in boxes:
            assert any(a - tolerance <= left and right <= b + tolerance for a, b in above)
        above = boxes


def test_it_loads_and_runs_nothing_and_takes_no_markup_from_names() -> None:
    graph = document(sampled())
    graph["profiles"][0]["name"] = "<b>title</b>"
    graph["shared"]["frames"][1]["name"] = '<script src="https://example.org">"'
    page = exporters.flame_page(graph)
    assert page is not None
    assert "<script" not in page
    assert "<b>" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=", page.replace("&quot;", "").replace("script src", ""))


def test_a_snapshots_frames_hold_what_no_category_tells() -> None:
    graph = exporters.snapshot_graph(device_snapshots.training(), "s.pickle").document
    page = exporters.flame_page(graph, intro="Each bar is a frame.", holder="innermost frame")
    assert page is not None
    assert "<h1>Live bytes, device 0</h1>" in page
    assert "<code>model (/src/model.py:2)</code></td><td>8.0 MiB</td><td>61.5%</td>" in page
    assert "What the memory is" not in page  # only a part of it has a state to tell


def test_without_bytes_there_is_no_page() -> None:
    assert exporters.flame_page(document(evented())) is None


def test_thousands_of_small_layers_stay_a_small_page() -> None:
    count = 5000
    profile = {
        **sampled(),
        "samples": [[0, 5 + number, 3] for number in range(count)],
        "weights": [1024] * count,
        "endValue": 1024 * count,
    }
    graph = document(profile)
    graph["shared"]["frames"] += [{"name": f"layers.{number}"} for number in range(count)]
    page = exporters.flame_page(graph)
    assert page is not None
    assert len(page) < 20_000
    assert "smaller ones are left out" in page
