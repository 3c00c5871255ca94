"""A run's summary agrees with its journal, also if the journal is damaged."""

import json
import tracemalloc
import typing
from pathlib import Path

import msgspec
import pytest
from support.journals import BEGUN_US, GIB, MIB, MadeRun, at, batch, cuda, finished_run, full_run

from memlog.events import (
    Alert,
    Batch,
    Device,
    DeviceReading,
    End,
    Epoch,
    Evaluation,
    Health,
    Phase,
    Run,
    Sample,
)
from memlog.journal import Binding, RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.metrics import axis_and_index, values
from memlog.reports import encode, summarize
from memlog.reports.accumulator import MAX_LISTED
from memlog.reports.page.facts import RunReader
from memlog.reports.summary import SummaryCache


def test_every_metric_is_summed_up_under_its_trackers_name(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    known: dict[str, list[float]] = {}
    for file in run.files():
        for entry in file.read():
            if axis_and_index(entry.event) is not None:
                for name, value, _ in values(entry.event):
                    if value is not None:
                        known.setdefault(name, []).append(value)
    metrics = summarize(run).metrics
    assert metrics.keys() == known.keys()
    for name, metric in metrics.items():
        found = known[name]
        assert (metric.last, metric.min, metric.max) == (found[-1], min(found), max(found))


def test_a_metric_says_where_it_was_known(tmp_path: Path) -> None:
    metrics = summarize(finished_run(tmp_path)).metrics
    loss = metrics["memory/step/loss"]
    assert (loss.axis, loss.first_index, loss.last_index) == ("step", 0, 199)
    assert (loss.last, loss.min, loss.max) == (2.01, 2.01, 4.0)
    tree = metrics["memory/host/tree_mib"]
    assert (tree.first_index, tree.last_index) == (99, 190)
    assert metrics["memory/eval/loss"].axis == "evaluation"
    assert metrics["memory/epoch/host/rss_mib"].axis == "epoch"


def test_the_last_value_is_that_of_the_last_index(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(batch(5, GIB))
    made.sampled(batch(4, 2 * GIB), batch(2, 3 * GIB))
    rss = summarize(made.closed()).metrics["memory/host/rss_mib"]
    assert (rss.first_index, rss.last_index, rss.last, rss.max) == (2, 5, 1024.0, 3072.0)


def test_peaks_say_how_they_were_obtained_and_at_which_step(tmp_path: Path) -> None:
    peaks = summarize(finished_run(tmp_path)).peaks
    assert {
        name: (peak.bytes, peak.source, peak.step, peak.evaluation) for name, peak in peaks.items()
    } == {
        "cuda0.allocated": (GIB + 120 * MIB, "exact", 120, None),
        "cuda0.reserved": (2 * GIB, "sampled", 0, None),
        "host.cgroup": (GIB, "sampled", 99, None),
        "host.rss": (GIB + 199 * MIB, "exact", 199, None),
        "host.tree": (3 * GIB, "sampled", None, None),
    }


def test_the_peak_of_a_phase_is_told_after_the_step_before(tmp_path: Path) -> None:
    phase = Phase(at(1), "loading", (), 5, GIB, 2 * GIB, "exact", step=0)
    early = summarize(MadeRun(tmp_path / "early").write(phase, batch(0, GIB)).closed())
    later = summarize(MadeRun(tmp_path / "later").write(batch(0, GIB), phase).closed())
    assert [one.peaks["host.rss"].place for one in (early, later)] == ["step 0", "after step 0"]


def test_of_equal_peaks_the_one_that_says_most_counts(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(
        Batch(at(0), 0, GIB, 2 * GIB, "watermark"),
        Batch(at(1), 1, 2 * GIB, 2 * GIB, "exact"),
        Batch(at(2), 2, GIB, 2 * GIB, "exact"),
        Epoch(at(3), 0, 2, GIB, 2 * GIB, "watermark"),
    )
    peak = summarize(made.closed()).peaks["host.rss"]
    assert (peak.source, peak.step) == ("exact", 1)


def test_without_a_watermark_what_was_read_is_a_lower_bound(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(
        Evaluation(at(0), 3, 0.5, GIB, (DeviceReading("mps0", MIB, None, None, None, None),)),
        Evaluation(at(1), 4, 0.5, GIB - 1),
    )
    peaks = summarize(made.closed()).peaks
    rss, device = peaks["host.rss"], peaks["mps0.allocated"]
    assert (rss.bytes, rss.source, rss.step, rss.evaluation) == (GIB, "sampled", None, 3)
    assert (device.bytes, device.source, device.evaluation) == (MIB, "sampled", 3)
    assert "mps0.reserved" not in peaks


def test_the_cost_of_a_run_without_timed_steps_is_unknown(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(
        Evaluation(at(1), 0, 0.5, GIB), Health(at(2), None, None, 0.0, {}, {}, steps=0)
    )
    health = summarize(made.closed()).health
    assert (health.overhead_ms_total, health.overhead_ms_per_step) == (None, None)


def test_what_is_unknown_is_null_and_never_zero(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(
        Device(at(0), "mps0", None, None), Batch(at(1), 0, None, None, None)
    )
    made.sampled(Sample(at(1), 0, None, None, None, None, None))
    summary = summarize(made.closed())
    unknown = {"bytes": None, "source": None, "step": None, "evaluation": None, "after_step": False}
    names = ("host.rss", "host.tree", "mps0.allocated", "mps0.reserved")
    assert msgspec.to_builtins(summary.peaks) == dict.fromkeys(names, unknown)
    assert summary.metrics == {}
    assert summary.steps == 1
    assert summary.health.overhead_ms_total is None
    assert summary.health.overhead_ms_per_step is None
    assert summary.health.journal_queued is None


def test_a_value_that_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(
        Evaluation(at(0), 0, 2.0, GIB),
        Evaluation(at(1), 1, float("nan"), GIB),
        Evaluation(at(2), 2, float("inf"), GIB),
    )
    summary = summarize(made.closed())
    loss = summary.metrics["memory/eval/loss"]
    assert (loss.last, loss.last_index, loss.max) == (2.0, 0, 2.0)
    assert summary.metrics["memory/eval/host/rss_mib"].last_index == 2
    assert summary.health.dropped == {}


def test_the_run_is_described(tmp_path: Path) -> None:
    finished = finished_run(tmp_path)
    summary = summarize(finished)
    run = summary.run
    assert finished.begun() == BEGUN_US / 1e6
    assert (run.id, run.name, run.project) == ("k7m2xq9a", "gpt-small", "language")
    assert run.backends == ["mlflow"]
    assert run.directory == str(tmp_path / "k7m2xq9a")
    assert (run.begun, run.ended) == ("2026-09-21T14:13:20.000Z", "2026-09-21T14:13:41.000Z")
    assert run.duration_s == 21.0
    assert run.parameters == {"torch": "2.13.0", "python": "3.11.4", "model": "GPT"}
    assert run.devices["cuda0"].product == "NVIDIA H100 80GB HBM3"
    assert run.devices["cuda0"].capacity_bytes == 80 * GIB
    assert summary.steps == 200
    [alert], [artifact] = summary.alerts, summary.artifacts
    assert (alert.step, alert.level, alert.rule) == (150, "warning", "host.rss > 1 GiB")
    assert (artifact.path, artifact.size_bytes) == ("artifacts/flame.svg", 123_456)


@pytest.mark.parametrize("status", ["finished", "failed", "killed"])
def test_the_end_says_the_status_even_while_the_process_lives(
    tmp_path: Path, status: typing.Literal["finished", "failed", "killed"]
) -> None:
    made = MadeRun(tmp_path, alive=True).write(batch(0, GIB), End(at(9), status))
    assert summarize(made.closed()).status == status


def test_a_process_that_lives_is_running(tmp_path: Path) -> None:
    summary = summarize(MadeRun(tmp_path, alive=True).write(batch(20, GIB)).closed())
    assert summary.status == "running"
    assert summary.run.ended is None
    assert summary.run.duration_s == 2.0


def test_a_process_that_ended_without_an_end_event_was_killed(tmp_path: Path) -> None:
    summary = summarize(MadeRun(tmp_path).write(batch(20, GIB)).closed())
    assert summary.status == "killed"
    assert summary.run.ended is None
    assert summary.run.newest_event == "2026-09-21T14:13:22.000Z"


def test_steps_that_have_no_batch_event_count_too(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(batch(10, GIB), Health(at(2), 14, 0.1, 1.5, {}, {}))
    summary = summarize(made.closed())
    assert (summary.steps, summary.first_step, summary.last_step) == (5, 10, 14)
    assert summary.health.overhead_ms_per_step == pytest.approx(0.1)


def test_an_empty_journal_says_nothing_rather_than_zero(tmp_path: Path) -> None:
    summary = summarize(MadeRun(tmp_path).closed())
    assert summary.steps == 0
    assert summary.run.newest_event is None
    assert summary.run.duration_s is None
    assert summary.health.published == 0


def test_health_tells_what_was_published_dropped_and_spent(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    UploadState(backend="mlflow", dropped={"rejected: memory/x": 3}, delivered=7).save(run)
    health = summarize(run).health
    lines = sum(path.read_bytes().count(b"\n") for path in run.path.glob("*.jsonl"))
    assert health.published == lines - len(list(run.path.glob("*.jsonl")))
    assert health.dropped == {"journal_write": 2, "mlflow: rejected: memory/x": 3}
    assert health.faults == {"reading cuda0: OSError": 1}
    assert health.overhead_ms_total == 2.5
    assert health.overhead_ms_per_step == 2.5 / 200
    assert health.journal_queued is False


def test_delivery_tells_each_sinks_runs_without_credentials(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(Run(at(0), None, None, ("mlflow", "local", "trackio"), {}))
    made.bound("mlflow", "first", "http://tracker").write(batch(0, GIB))
    made.bound("mlflow", "second", "http://me:secret@tracker", "of http://me:secret@host")
    made.write(batch(1, GIB))
    state = UploadState(
        backend="mlflow",
        stage="unreachable",
        problem="http://me:secret@tracker answers 503",
        own_run=Binding("own", "http://me:secret@tracker"),
        joined=["second", "before"],
        delivered=12,
    )
    state.save(made.directory)
    delivered = msgspec.to_builtins(summarize(made.closed()).health.delivered)
    assert delivered == {
        "mlflow": {
            "points": 12,
            "stage": "unreachable",
            "problem": "http://tracker answers 503",
            "runs": [
                {"id": id_, "uri": uri, "own": id_ == "own", "name": name, "offset": 0}
                for id_, uri, name in (
                    ("first", "http://tracker", None),
                    ("second", "http://tracker", "of http://host"),
                    ("before", None, None),
                    ("own", "http://tracker", None),
                )
            ],
        },
        "trackio": {"points": 0, "stage": "waiting", "problem": None, "runs": []},
    }


def last_segment(run: RunDirectory) -> Path:
    return max(run.path.glob("trainer-*.jsonl"))


def test_a_torn_last_line_is_skipped_and_reported(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(*(batch(step, GIB) for step in range(5))).closed()
    segment = last_segment(run)
    segment.write_bytes(segment.read_bytes()[:-7])
    summary = summarize(run)
    assert summary.steps == 4
    assert summary.health.published == 4
    assert summary.health.dropped == {"journal_torn": 1}


def test_half_a_line_of_a_process_that_lives_is_not_torn_yet(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, alive=True).write(batch(0, GIB), batch(1, GIB)).closed()
    segment = last_segment(run)
    segment.write_bytes(segment.read_bytes()[:-7])
    assert summarize(run).health.dropped == {}


def test_lines_that_memlog_did_not_write_are_counted(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(batch(0, GIB)).closed()
    with last_segment(run).open("ab") as file:
        file.write(b'hello\n[1,["teleport",1]]\n')
        # A number that can't be so many MiB; of the calendar, and of a screen's width.
        file.write(b'[2,["batch",1,1,' + b"9" * 400 + b",null,null]]\n")
        file.write(b'[3,["loss",' + b"9" * 18 + b",1,0.5]]\n")
    summary = summarize(run)
    assert summary.health.dropped == {"journal_garbage": 2, "journal_unknown_event": 1}
    assert summary.health.published == 2
    assert summary.run.newest_event is None
    assert json.loads(encode(summary))["steps"] == 2


def test_the_document_is_the_same_each_time_and_sorted(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    document = encode(summarize(run))
    assert document == encode(summarize(run))
    assert (
        document == encode(summarize(run, remember=True)) == encode(summarize(run, remember=True))
    )
    assert json.dumps(json.loads(document), sort_keys=True, indent=2) == document.decode()


def test_what_is_remembered_never_outlives_a_change_of_the_journal(tmp_path: Path) -> None:
    made = full_run(tmp_path)
    run = made.closed()
    assert summarize(run, remember=True).status == "killed"
    helper = next(run.path.glob("helper-*.jsonl"))
    with helper.open("ab") as file:
        file.write(b'[99,["end",1790000030000000,"failed",null]]\n')
    assert summarize(run, remember=True).status == "failed"
    assert encode(summarize(run, remember=True)) == encode(summarize(run))


def test_a_run_that_lives_is_not_remembered(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True).write(batch(0, GIB))
    assert summarize(made.directory, remember=True).steps == 1
    assert not (made.directory.path / "summary.json").exists()
    made.write(batch(1, GIB))
    assert summarize(made.closed(), remember=True).steps == 2


def test_what_is_remembered_is_not_trusted(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    expected = encode(summarize(run, remember=True))
    kept = run.path / "summary.json"
    for damaged in (b"", b"{", b'{"version":1}', kept.read_bytes().replace(b'"0', b'"9', 1)):
        kept.write_bytes(damaged)
        assert encode(summarize(run, remember=True)) == expected


def test_lists_are_bounded_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    for number in range(MAX_LISTED + 5):
        made.write(Alert(at(number), number, "info", "a > b", "title", "text"))
    summary = summarize(made.closed())
    assert len(summary.alerts) == MAX_LISTED
    assert summary.omitted == {"alerts": 5}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_journal(tmp_path: Path) -> None:
    short, long = (
        MadeRun(tmp_path, name).write(*(batch(step, GIB + step, cuda(GIB)) for step in range(n)))
        for name, n in (("short", 500), ("long", 10_000))
    )
    peaks = []
    for run in (short.closed(), long.closed()):
        summarize(run)
        tracemalloc.start()
        summarize(run)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # What grows is the list of the journal's files.
    files = len(list(long.directory.path.glob("*.jsonl")))
    assert peaks[1] - peaks[0] < 2_000 * files


def test_numbers_that_are_missing_were_lost(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(batch(0, GIB)).closed()
    with last_segment(run).open("ab") as file:
        file.write(b'[11,["loss",1,1,0.5]]\n')
    assert summarize(run).health.dropped == {"journal_lost": 10}


def test_a_report_that_is_made_twice_counts_what_was_lost_once(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    [file, *_] = run.path.glob("trainer-*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:5], b"{damaged\n", *lines[6:]]))
    reader = RunReader(run)
    assert encode(reader.summary()) == encode(reader.summary()) == encode(summarize(run))
    reader.cache_summary()
    assert SummaryCache(run).load(alive=False) is not None
    assert encode(summarize(run, remember=True)) == encode(summarize(run))


def test_a_moved_folder_keeps_its_cached_summary(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "here")
    summarize(run, remember=True)
    moved = RunDirectory(run.path.rename(tmp_path / "there"))
    cached = SummaryCache(moved).load(alive=False)
    assert cached is not None
    assert cached == summarize(moved)
    assert cached.run.directory == str(moved.path)
