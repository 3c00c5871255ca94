"""Comparing runs, and gates on the change."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.commands import memlog
from support.journals import GIB, MIB, MadeRun, at, batch, cuda
from support.training import CASES, measured_peak, traced

from memlog.events import Batch, Device, End, Evaluation, Run, Trace, TracedLayer
from memlog.journal import RunDirectory
from memlog.reports import figures
from memlog.reports.compare import compare
from memlog.reports.figures import run_figures
from memlog.tracer.schedule.kept_trace import trace_event


@pytest.fixture(autouse=True)
def _runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def trace(peak: int, at_peak: dict[str, int], **layers: int) -> Trace:
    held = tuple(TracedLayer(path, size, peak, size, size) for path, size in layers.items())
    return Trace(at(1), 3, "dispatch", True, peak, at_peak, held, 0)


def made(root: Path, run_id: str, *, peak: int = GIB, every_s: float = 0.1) -> MadeRun:
    """Make a run of five steps on a GPU."""
    run = MadeRun(root, run_id).write(
        Run(at(0), f"run {run_id[0]}", None, (), {}), Device(at(0), "cuda0", "GPU", 80 * GIB)
    )
    for step in range(5):
        run.write(Batch(at(step * every_s), step, GIB, GIB, "exact", (cuda(GIB // 2, peak),)))
    return run


def two_runs(root: Path) -> None:
    small = {"activations": 100 * MIB, "parameters": 10 * MIB}
    run = made(root, "aaaa2222").write(
        trace(50 * MIB, {"activations": 50 * MIB}, old=5),
        trace(110 * MIB, small, head=60 * MIB, body=40 * MIB),
        trace(60 * MIB, {"activations": 60 * MIB}, older=5),
    )
    run.write(End(at(9), "finished")).closed()
    large = {"activations": 150 * MIB, "gradients": 10 * MIB}
    run = made(root, "bbbb2222", peak=2 * GIB, every_s=0.15)
    run.write(trace(160 * MIB, large, head=90 * MIB, tail=50 * MIB))
    run.write(End(at(9), "finished")).closed()


def test_layers_of_which_nobody_knows_what_they_held_are_left_out(tmp_path: Path) -> None:
    """The sampling engine records no allocations."""
    for run_id in ("aaaa2222", "bbbb2222"):
        sampled = (TracedLayer("head", None, 110 * MIB, None, None),)
        event = Trace(at(1), 3, "sampler", False, 110 * MIB, {}, sampled, None)
        made(tmp_path, run_id).write(event, End(at(9), "finished")).closed()
    document = json.loads(memlog("compare", "aaaa", "bbbb", "--json").stdout)
    assert document["layers"] == {}
    assert document["figures"]["trace.peak"]["values"] == [110 * MIB, 110 * MIB]


def test_figures_stand_side_by_side_with_the_change(tmp_path: Path) -> None:
    two_runs(tmp_path)
    lines = memlog("compare", "aaaa", "bbbb").stdout.splitlines()
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in lines if line}

    assert lines[0].split() == ["aaaa2222", "run", "a", "bbbb2222", "run", "b", "change"]
    assert rows["status"] == "status finished finished"
    assert rows["device.peak"] == "device.peak 1.0 GiB 2.0 GiB +100.0 %"
    assert rows["device.allocated"] == "device.allocated 512.0 MiB 512.0 MiB +0.0 %"
    assert rows["host.rss"] == "host.rss 1.0 GiB 1.0 GiB +0.0 %"
    assert rows["step.time"] == "step.time 100.0 ms 150.0 ms +50.0 %"
    assert rows["trace.peak"] == "trace.peak 110.0 MiB 160.0 MiB +45.5 %"
    # Of the worst step. A category that a trace lacks holds nothing; a layer that it does not name is
    # unknown.
    assert rows["activations"] == "activations 100.0 MiB 150.0 MiB +50.0 %"
    assert rows["parameters"] == "parameters 10.0 MiB 0 B -100.0 %"
    assert rows["gradients"] == "gradients 0 B 10.0 MiB"
    assert rows["head"] == "head 60.0 MiB 90.0 MiB +50.0 %"
    assert rows["tail"] == "tail unknown 50.0 MiB"
    assert "old" not in rows
    assert "host.tree" not in rows
    assert "cuda0.peak" not in rows  # there is one device


def test_the_document_is_stable(tmp_path: Path) -> None:
    two_runs(tmp_path)
    result = memlog("compare", "aaaa", "bbbb", "aaaa", "--json", "--fail-if", "device.peak > +200%")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document) == {"schema", "runs", "figures", "categories", "layers", "gates", "notes"}
    assert document["notes"] == []
    assert document["schema"] == 1
    assert document["runs"][1] == {
        "id": "bbbb2222",
        "name": "run b",
        "status": "finished",
        "steps": 5,
        "traced_peak": 160 * MIB,
        "trace_peak_from": "traced",
    }
    assert document["figures"]["device.peak"] == {
        "unit": "bytes",
        "values": [GIB, 2 * GIB, GIB],
        "changes_percent": [None, 100.0, 0.0],
    }
    assert document["figures"]["host.tree"]["values"] == [None, None, None]
    assert document["figures"]["step.time"]["unit"] == "ms"
    assert document["layers"]["tail"]["values"] == [None, 50 * MIB, None]
    assert document["gates"][0] == {
        "gate": "device.peak > +200%",
        "run": "bbbb2222",
        "figure": "device.peak",
        "unit": "bytes",
        "first": GIB,
        "value": 2 * GIB,
        "failed": False,
        "why": None,
    }
    assert [verdict["run"] for verdict in document["gates"]] == ["bbbb2222", "aaaa2222"]


@pytest.mark.parametrize(
    ("gate", "fails"),
    [
        ("device.peak > +5%", True),
        ("device.peak > +100%", False),
        ("device.peak >= +100%", True),
        ("cuda0.peak > +1023 MiB", True),
        ("cuda0.peak>+1 GiB", False),
        ("device.peak < -30%", False),
        ("device.peak > -30%", True),  # it does not save 30 %
        ("device.allocated > +0%", False),
        ("device.fragmentation > +0.1", False),
        ("host.rss <= +0 B", True),
        ("step.time > +10%", True),
        ("step.time > +60 ms", False),
        ("step.time > +0.04 s", True),
        ("trace.peak > +45%", True),
    ],
)
def test_a_gate_that_is_true_exits_with_1(tmp_path: Path, gate: str, fails: bool) -> None:
    two_runs(tmp_path)
    result = memlog("compare", "aaaa", "bbbb", "--fail-if", gate)
    assert result.exit_code == int(fails), result.output
    assert "device.peak" in result.stdout
    if fails:
        [line] = result.stderr.splitlines()
        assert line.startswith(f"memlog: the gate '{gate}' failed: run bbbb2222 has ")


def test_the_line_says_what_the_gate_saw(tmp_path: Path) -> None:
    two_runs(tmp_path)
    gates = ("--fail-if", "device.peak > +5%", "--fail-if", "step.time > +5%")
    result = memlog("compare", "aaaa", "bbbb", *gates)
    assert result.exit_code == 1
    assert result.stderr == (
        "memlog: the gate 'device.peak > +5%' failed: run bbbb2222 has 2.0 GiB against 1.0 GiB (+100.0 %); "
        "the gate 'step.time > +5%' failed: run bbbb2222 has 150.0 ms against 100.0 ms (+50.0 %)\n"
    )


def test_a_gate_on_what_nobody_knows_is_no_pass(tmp_path: Path) -> None:
    two_runs(tmp_path)
    made(tmp_path, "cccc2222").write(End(at(9), "finished")).closed()
    for gate, where in (
        ("host.tree > +5%", "host.tree is unknown in the first run"),
        ("cuda1.peak > +5%", "cuda1.peak is unknown in the first run"),
        ("trace.peak > +5%", "trace.peak is unknown in run cccc2222"),
    ):
        result = memlog("compare", "aaaa", "cccc", "--fail-if", gate)
        assert result.exit_code == 1
        assert result.stderr == f"memlog: the gate '{gate}' can't be judged: {where}\n"


@pytest.mark.parametrize(
    ("gate", "place", "remedy"),
    [
        ("device.pek > +5%", 0, "did you mean device.peak?"),
        ("> +5%", 0, "figures are host.rss"),
        ("device.peak", 11, "write >, >=, < or <="),
        ("device.peak = +5%", 12, "write >, >=, < or <="),
        ("device.peak > 5%", 14, "write + or -"),
        ("device.peak > +", 15, "a change such as +5% or +100 MiB"),
        ("device.peak > +5", 16, "write the unit here"),
        ("device.peak > +5 ms", 17, "write the unit here"),
        ("step.time > +5 MiB", 15, "write the unit here: ms, s or %"),
        ("device.peak > +5% now", 18, "the gate ends here"),
        ("gpu0.peak > +5%", 0, "for one device, write cuda0.peak"),
        ("cuda:0.peak > +5%", 0, "write cuda0.peak"),
    ],
)
def test_a_wrong_gate_is_pointed_at(gate: str, place: int, remedy: str) -> None:
    result = memlog("compare", "aaaa", "bbbb", "--fail-if", gate)
    assert result.exit_code == 2
    assert result.stdout == ""
    message, shown, caret = result.stderr.splitlines()
    assert message.startswith("memlog: a gate can't be read: ")
    assert remedy in message
    assert shown == f"  {gate[:200]}"
    assert caret == f"  {' ' * place}^"


@pytest.mark.parametrize(
    ("end", "reason"),
    [(End(at(9), "failed"), "failed"), (None, "killed"), (End(at(9), "killed"), "killed")],
)
@pytest.mark.parametrize("which", ["first", "other"])
def test_a_run_that_is_not_finished_passes_no_gate(
    tmp_path: Path, which: str, end: End | None, reason: str
) -> None:
    made(tmp_path, "aaaa2222").write(End(at(9), "finished")).closed()
    broken = made(tmp_path, "bbbb2222")
    if end is not None:
        broken.write(end)
    broken.closed()
    names = ("aaaa", "bbbb") if which == "other" else ("bbbb", "aaaa")
    gate = ("--fail-if", "device.peak > +5%")
    result = memlog("compare", *names, *gate)
    assert result.exit_code == 1
    assert result.stderr == (
        f"memlog: the gate 'device.peak > +5%' can't be judged: run bbbb2222 is not finished ({reason}); "
        "--allow-unfinished judges it anyway\n"
    )
    output = " ".join(result.stdout.split())
    assert "status finished" in output or f"status {reason}" in output
    assert f"Run bbbb2222 is not finished ({reason}): its figures are of 5 steps." in output
    assert memlog("compare", *names).exit_code == 0
    assert memlog("compare", *names, *gate, "--allow-unfinished").exit_code == 0


def test_a_run_that_is_not_over_passes_no_gate(tmp_path: Path) -> None:
    made(tmp_path, "aaaa2222").write(End(at(9), "finished")).closed()
    MadeRun(tmp_path, "bbbb2222", alive=True).write(batch(0, GIB)).closed()
    result = memlog("compare", "aaaa", "bbbb", "--fail-if", "host.rss > +5%")
    assert result.exit_code == 1
    assert "run bbbb2222 is not finished (running)" in result.stderr


def first_step_alone(root: Path, run_id: str, make: Any) -> RunDirectory:
    """A run of the MLP of which only the first step was traced, as in a short run."""
    recorded = traced(CASES["mlp"], step=0, make=make)
    event = trace_event(recorded.result, 0)
    run = made(root, run_id).write(event, End(at(9), "finished")).closed()
    run.worst_step.write_bytes(msgspec.msgpack.encode((event, recorded)))
    return run


def test_of_a_first_step_the_peak_of_a_later_one_is_compared(tmp_path: Path) -> None:
    sgd, adam = partial(torch.optim.SGD, lr=0.01), torch.optim.Adam
    for run_id, make in (("aaaa2222", sgd), ("bbbb2222", adam)):
        first_step_alone(tmp_path, run_id, make)
    gate = ("--fail-if", "trace.peak > +5%")
    result = memlog("compare", "aaaa", "bbbb", "--json", *gate)
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    peaks = document["figures"]["trace.peak"]["values"]
    for peak, make in zip(peaks, (sgd, adam), strict=True):
        assert peak == pytest.approx(measured_peak(CASES["mlp"], make=make), rel=0.1)
    assert peaks[1] == json.loads(memlog("advise", "bbbb", "--json").stdout)["advice"]["peak"]
    assert [run["trace_peak_from"] for run in document["runs"]] == ["traced", "derived"]
    assert document["runs"][1]["traced_peak"] < peaks[1]
    [note] = document["notes"]
    assert note.startswith(
        "trace.peak of run bbbb2222 is computed, not measured. The largest traced step "
    )
    assert note in " ".join(memlog("compare", "aaaa", "bbbb").stdout.split())


def test_a_first_step_that_says_nothing_of_later_ones_passes_no_gate(tmp_path: Path) -> None:
    for run_id in ("aaaa2222", "bbbb2222"):
        first_step_alone(tmp_path, run_id, torch.optim.Adam)
    RunDirectory(tmp_path / "bbbb2222").worst_step.unlink()
    result = memlog("compare", "aaaa", "bbbb", "--fail-if", "trace.peak > +5%")
    assert result.exit_code == 1
    assert result.stderr.endswith("can't be judged: trace.peak is unknown in run bbbb2222\n")
    assert "trace.peak of run bbbb2222 is unknown" in " ".join(result.stdout.split())


def test_one_run_alone_is_no_comparison(tmp_path: Path) -> None:
    two_runs(tmp_path)
    result = memlog("compare", "aaaa")
    assert result.exit_code == 2
    assert result.stderr == "memlog: name two runs or more: `memlog runs` lists them\n"


def test_the_step_time_is_that_of_one_step_whatever_every_is(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(*(batch(step, GIB) for step in range(0, 90, 10)))
    assert run_figures(run.closed()).figures["step.time"] == pytest.approx(100)


def test_the_step_time_is_a_median_and_forgets_pauses(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 60.0, 60.1, 60.2, 60.25]
    run = MadeRun(tmp_path, "aaaa2222")
    for step, time in enumerate(times):
        run.write(Batch(at(time), step, None, None, None))
    found = run_figures(run.closed())
    assert found.figures["step.time"] == pytest.approx(100)
    assert found.figures["host.rss"] is None
    assert found.status == "killed"
    assert found.steps == 7


def test_evaluations_have_a_time_of_their_own(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, "aaaa2222")
    for number in range(4):
        run.write(Evaluation(at(number / 4), number, 1.0, GIB))
    found = run_figures(run.closed())
    assert found.figures["evaluation.time"] == pytest.approx(250)
    assert found.figures["step.time"] is None
    assert found.figures["host.rss"] == GIB


def test_times_of_a_long_run_are_thinned_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_MOST_TIMES", 8)
    run = MadeRun(tmp_path).write(*(batch(step, GIB) for step in range(100)))
    assert run_figures(run.closed()).figures["step.time"] == pytest.approx(100)


def test_of_several_devices_the_highest_counts(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, "aaaa2222").write(
        batch(0, GIB, cuda(MIB), cuda(3 * MIB, 4 * MIB, index=1))
    )
    found = compare([run_figures(run.closed())] * 2)
    assert found.figures["cuda0.peak"].values == (MIB, MIB)
    assert found.figures["device.peak"].values == (4 * MIB, 4 * MIB)
    assert found.figures["device.allocated"].values == (3 * MIB, 3 * MIB)
