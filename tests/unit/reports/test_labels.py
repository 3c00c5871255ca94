"""Blocks and points that the user watches by hand: in `show`, and in trackers if their step is known."""

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.journals import GIB, MIB, MadeRun, at, batch, cuda
from support.sinks import ListSink, ListTracker

import memlog
from memlog.cli.main import cli
from memlog.events import Alert, DeviceReading, Recorded, Scope
from memlog.journal import find_run
from memlog.metrics import safe_label
from memlog.reports.accumulator import MAX_LABELS
from memlog.reports.summary import summarize
from memlog.session.arguments import MAX_METRIC_LABELS
from memlog.sink import Target


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_blocks_and_points_reach_trackers_at_the_last_step_and_show(tmp_path: Path) -> None:
    tracker = ListTracker()
    session = memlog.init([ListSink(tracker, Target("x", None))])
    with memlog.track_memory("before any step", print_output=False):
        pass
    profiler = memlog.BatchMemoryProfiler()
    tracked = memlog.MemoryTracker()
    for _ in range(3):
        with memlog.track_memory("load data", print_output=False):
            block = bytearray(4 * MIB)
        profiler.checkpoint("forward")
        tracked.record("after")
        session.step()
    with pytest.raises(ValueError, match="no"), memlog.track_memory("load data"):
        raise ValueError("no")
    del block
    memlog.finish()
    [points] = tracker.points.values()
    found = {(p.name, p.axis, p.index) for p in points if "scope" in p.name or "point" in p.name}
    assert {("memory/scope/load_data/host/rss_change_mib", "step", n) for n in range(3)} <= found
    assert {("memory/point/forward/host/rss_mib", "step", n) for n in range(2)} <= found
    assert not [name for name, *_ in found if "before" in name]
    summary = summarize(find_run(tmp_path, session.id or ""))
    load = summary.scopes["load data"]
    assert (load.count, load.errors) == (4, 1)
    assert load.rss_change.largest_bytes is not None
    assert summary.points["forward"].count == summary.points["after"].count == 3
    page = CliRunner().invoke(cli, ["show", "latest", "--all"]).output
    assert "Blocks and functions" in page
    assert "load data" in page
    assert "Points" in page


def test_too_many_labels_are_counted_and_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = ListTracker()
    session = memlog.init([ListSink(tracker, Target("x", None))])
    session.step()
    tracked = memlog.MemoryTracker()
    with caplog.at_level(logging.WARNING):
        for number in range(MAX_METRIC_LABELS + 10):
            tracked.record(f"label {number}")
            tracked.record(f"label {number}")
    memlog.finish()
    [points] = tracker.points.values()
    assert len({p.name for p in points if "point" in p.name}) == MAX_METRIC_LABELS
    assert session.health.dropped == {"labels": 20}
    assert caplog.text.count("trackers get metrics of only the first 50") == 1
    assert len(summarize(find_run(tmp_path, session.id or "")).points) == MAX_METRIC_LABELS + 10


def test_the_document_has_the_last_and_the_largest_of_each_label(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.write(batch(0, GIB))
    for change in (5, 9, -3):
        device = DeviceReading("cuda0", change * MIB, 0, (20 + change) * MIB, "exact", 0)
        made.write(Scope(at(change), "train", 500_000, change * MIB, (device,), None, 0))
        made.write(Recorded(at(change), "here", (20 + change) * MIB, (cuda(change * MIB),), 0))
    for number in range(MAX_LABELS + 5):
        made.write(Recorded(at(9), f"n{number}", MIB))
    summary = summarize(made.closed())
    train, here = summary.scopes["train"], summary.points["here"]
    assert (train.count, train.duration_s) == (3, 1.5)
    assert (train.rss_change.last_bytes, train.rss_change.largest_bytes) == (-3 * MIB, 9 * MIB)
    assert train.devices["cuda0"].allocated_change.largest_bytes == 9 * MIB
    assert train.devices["cuda0"].peak_bytes == 29 * MIB
    assert train.devices["cuda0"].peak_source == "exact"
    assert (here.rss.last_bytes, here.rss.largest_bytes) == (17 * MIB, 29 * MIB)
    assert here.allocated["cuda0"].last_bytes == -3 * MIB
    assert summary.omitted["points"] == 6
    page = CliRunner().invoke(cli, ["show", "latest", "--all"]).output
    assert "+9.0 MiB" in page
    assert "29.0 MiB" in page
    assert "and 150 more labels: --json has them" in page


def test_alerts_stand_in_the_order_in_which_they_came_with_their_place(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.write(batch(0, GIB))
    for step in (9, 2):
        made.write(Alert(at(step), step, "info", "r", f"at {step}", ""))
    made.sampled(Alert(at(5), None, "info", "r", "at 5", "", None, 7))
    summary = summarize(made.closed())
    assert [alert.title for alert in summary.alerts] == ["at 2", "at 5", "at 9"]
    assert "evaluation 7" in CliRunner().invoke(cli, ["show", "latest", "--all"]).output


def test_labels_that_differ_stay_different_metrics() -> None:
    alike = ["load data", "load/data", "load:data", "\u00e4", "\u00f6", "..", ""]
    labels = [*alike, "a" * 200, "a" * 201]
    names = [safe_label(label) for label in labels]
    assert names[0] == "load_data"
    assert len(set(names)) == len(labels)
    assert all(name.isascii() and "/" not in name and len(name) < 100 for name in names)
