"""The drawing of a snapshot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.device_snapshots import MIB, block, segment, snapshot
from support.models import GPT, text

from memlog import MemoryTracer, SnapshotError
from memlog._internal.terminal import format_bytes
from memlog.artifacts.snapshots import draw_snapshot
from memlog.trace.exporters import trace_plot


def entry(action: str, address: int, size: int, name: Any = "layer") -> dict[str, Any]:
    frames = [{"name": name, "filename": "f", "line": 1}]
    return {"action": action, "addr": address, "size": size, "frames": frames}


def shapes(page: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return tooltips and corners, "all others" first."""
    found = []
    for corners, label in re.findall(
        r'<path d="([^"]+)"[^>]*><title>(.*?)</title>', page, re.DOTALL
    ):
        pairs = re.findall(r"([\d.]+) (-?[\d.]+)", corners)
        found.append((label, [(float(x), float(y)) for x, y in pairs]))
    return found


@pytest.mark.seed(265, 281)
def test_a_traced_step_is_drawn_with_its_peak_and_nothing_is_fetched(tmp_path: Path) -> None:
    model, tracer = GPT(), MemoryTracer()
    with tracer.trace(model):
        model(text()).square().mean().backward()
    file = draw_snapshot(tracer.export_snapshot(tmp_path / "s.pickle"), tmp_path / "memory.html")
    page = file.read_text(encoding="utf-8")
    assert f"{format_bytes(tracer.result.peak)} at the peak" in page
    labels = [label for label, _ in shapes(page)]
    assert any("blocks.1" in label and "forward" in label for label in labels)
    assert any("backward" in label for label in labels)
    assert "<script" not in page
    assert set(re.findall(r"https?://[^\"]+", page)) == {"http://www.w3.org/2000/svg"}  # a name


def test_bands_stack_and_fall_when_a_lower_one_is_freed() -> None:
    page = trace_plot(
        snapshot(
            history=[
                entry("alloc", 1, 3 * MIB, "below"),
                entry("alloc", 2, MIB, "above"),
                entry("free_requested", 1, 3 * MIB),
                entry("free_completed", 1, 3 * MIB),
            ]
        ),
        "it",
    )
    assert "4.0 MiB at the peak" in page
    (_, _), (below, first), (above, second) = shapes(page)
    assert below == "3.0 MiB\nbelow"
    assert above == "1.0 MiB\nabove"
    # The drawing is 500 high for 4 MiB. Bands: 0 to 3 MiB, and 3 to 4 MiB, later 0 to 1 MiB.
    assert {y for _, y in first} == {500, 125}
    assert {y for _, y in second} == {125, 0, 500, 375}


def test_storages_from_before_are_at_the_bottom() -> None:
    blocks = block(100, 50, "inactive"), block(150, MIB, "active_allocated")
    history = (entry("alloc", 7, MIB, "new"), entry("free_requested", 9, 2 * MIB))
    page = trace_plot(snapshot(segment(*blocks), history=history), "it")
    assert "4.0 MiB at the peak" in page
    assert [label for label, _ in shapes(page)[1:]] == ["2.0 MiB", "1.0 MiB", "1.0 MiB\nnew"]


def test_small_storages_share_one_band() -> None:
    many = [entry("alloc", number, 1000 + number) for number in range(1000)]
    page = trace_plot(snapshot(history=many), "it")
    assert len(shapes(page)) == 401
    assert f"{format_bytes(sum(1000 + n for n in range(1000)))} at the peak" in page


def test_names_cannot_become_markup() -> None:
    page = trace_plot(snapshot(history=[entry("alloc", 1, 5, "<script>x</script>\ud800")]), "<b>")
    assert "<script" not in page
    assert "<b>" not in page


def test_what_is_no_snapshot_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"none")
    with pytest.raises(SnapshotError):
        draw_snapshot(tmp_path / "x", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
