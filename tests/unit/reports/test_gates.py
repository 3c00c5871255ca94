"""Gates with absolute limits, baseline files, and repeats of one training."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from support.commands import complaint, memlog, output_of
from support.journals import GIB, MIB, MadeRun, at

from memlog.events import Batch, End, Run, Trace, TracedLayer
from memlog.journal import RunDirectory
from memlog.reports.figures import repeated, run_figures
from memlog.reports.gates import Baseline, judge, parse_gate


@pytest.fixture(autouse=True)
def _runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path / "runs"))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def made(
    run_id: str,
    peak: int | None = 100 * MIB,
    rss: int = GIB,
    name: str | None = "tiny",
    end: str = "finished",
) -> Path:
    """Make a run of five steps of 0.1 s in the folder ``runs``. ``peak`` is that of a traced step."""
    run = MadeRun(Path("runs"), run_id).write(Run(at(0), name, None, (), {}))
    for step in range(5):
        run.write(Batch(at(step / 10), step, rss, rss, "exact"))
    if peak is not None:
        layers = (TracedLayer("head", peak // 2, peak, peak, peak),)
        at_peak = {"activations": peak - MIB, "parameters": MIB}
        run.write(Trace(at(1), 3, "dispatch", True, peak, at_peak, layers, 0))
    return run.write(End(at(9), end)).closed().path  # type: ignore[arg-type]


def baseline(**trainings: dict[str, object]) -> None:
    Path("memory.json").write_text(json.dumps({"schema": 1, "trainings": trainings}))


@pytest.mark.parametrize(
    ("gate", "fails"),
    [
        ("trace.peak > 99 MiB", True),
        ("trace.peak > 100 MiB", False),
        ("trace.peak >= 100 MiB", True),
        ("trace.peak < 0.1 GiB", True),
        ("host.rss <= 1023 MiB", False),
        ("step.time > 99 ms", True),
        ("step.time > 0.2 s", False),
    ],
)
def test_an_absolute_limit_judges_a_run_alone(gate: str, fails: bool) -> None:
    made("aaaa2222")
    result = memlog("compare", "aaaa", "--fail-if", gate)
    assert result.exit_code == int(fails), result.output
    assert "trace.peak" in result.stdout
    if fails:
        assert result.stderr.startswith(f"memlog: the gate '{gate}' failed: run aaaa2222 has ")
        assert " against " not in result.stderr


def test_of_several_runs_the_first_is_the_measure_and_not_judged() -> None:
    made("aaaa2222", peak=200 * MIB)
    made("bbbb2222", peak=100 * MIB)
    gate = ("--fail-if", "trace.peak > 150 MiB")
    assert memlog("compare", "aaaa", "bbbb", *gate).exit_code == 0
    document = json.loads(memlog("compare", "bbbb", "aaaa", *gate, "--json").stdout)
    [result] = document["gates"]
    assert (result["run"], result["first"], result["failed"]) == ("aaaa2222", None, True)


def test_a_change_needs_a_second_run() -> None:
    made("aaaa2222")
    line = complaint("compare", "aaaa", "--fail-if", "trace.peak > +5%", code=2)
    assert line == (
        "the gate 'trace.peak > +5%' is about a change: name two runs, or write a limit such as "
        '"trace.peak > 600 MiB"'
    )


def test_an_absolute_limit_on_an_unknown_figure_is_no_pass() -> None:
    made("aaaa2222", peak=None)
    made("bbbb2222", end="failed")
    for run, gate, why in (
        ("aaaa", "trace.peak > 1 GiB", "trace.peak is unknown in run aaaa2222"),
        ("bbbb", "trace.peak > 1 GiB", "run bbbb2222 is not finished (failed); --allow-unfinished"),
    ):
        result = memlog("compare", run, "--fail-if", gate)
        assert result.exit_code == 1
        assert f"can't be judged: {why}" in result.stderr


def test_a_run_is_named_by_its_folder() -> None:
    elsewhere = made("aaaa2222").rename("copied-run")
    made("bbbb2222", peak=110 * MIB)
    result = memlog("compare", f"./{elsewhere}", "runs/bbbb2222/", "--fail-if", "trace.peak > +5%")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].split()[:4] == ["copied-run", "tiny", "bbbb2222", "tiny"]
    assert "run copied-run  finished  tiny" in output_of("show", "./copied-run")
    line = complaint("compare", "./none", "bbbb")
    assert "is called './none'" in line


def test_a_baseline_file_is_written_and_compared() -> None:
    made("aaaa2222")
    made("bbbb2222", peak=102 * MIB)
    result = memlog("compare", "memory.json", "aaaa", "--update")
    assert result.exit_code == 0
    assert result.stderr == "memlog: wrote the figures of 'tiny' into memory.json\n"
    assert Path("memory.json").read_text() == (
        """{
  "schema": 1,
  "trainings": {
    "tiny": {
      "categories": {
        "activations": 103809024,
        "parameters": 1048576
      },
      "figures": {
        "trace.peak": 104857600
      },
      "layers": {
        "head": 52428800
      }
    }
  }
}
"""
    )
    gate = ("--fail-if", "trace.peak > +1%")
    assert memlog("compare", "memory.json", "aaaa", *gate).exit_code == 0
    result = memlog("compare", "memory.json", "bbbb", *gate)
    assert result.exit_code == 1
    rows = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["trace.peak"][1:] == ["100.0", "MiB", "102.0", "MiB", "+2.0", "%"]
    assert rows["activations"][-2:] == ["+2.0", "%"]
    assert rows["head"][-2:] == ["+2.0", "%"]
    assert "run bbbb2222 has 102.0 MiB against 100.0 MiB (+2.0 %)" in result.stderr


def test_an_update_leaves_other_trainings_as_they_are() -> None:
    baseline(large={"figures": {"trace.peak": 5}}, tiny={"figures": {"trace.peak": 7}})
    made("aaaa2222")
    result = memlog("compare", "memory.json", "aaaa", "--update")
    assert "trace.peak" in result.stdout  # the change against the entry before
    trainings = json.loads(Path("memory.json").read_text())["trainings"]
    assert list(trainings) == ["large", "tiny"]
    assert trainings["large"]["figures"] == {"trace.peak": 5}
    assert trainings["tiny"]["figures"] == {"trace.peak": 100 * MIB}


def test_a_figure_that_varies_is_kept_with_its_repeats_only() -> None:
    for at_run, run_id in enumerate(("aaaa2222", "bbbb2222", "cccc2222")):
        made(run_id, rss=GIB + at_run * MIB)
    output = memlog("compare", "memory.json", "cccc", "aaaa", "bbbb", "--update")
    assert output.stdout.splitlines()[0].strip() == "cccc2222 and 2 more tiny"
    figures = json.loads(Path("memory.json").read_text())["trainings"]["tiny"]["figures"]
    assert figures == {
        "host.rss": [GIB, GIB + MIB, GIB + 2 * MIB],
        "trace.peak": 100 * MIB,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ("none.json", "aaaa"),
            2,
            "there is no baseline file none.json: the same command with --update writes it",
        ),
        (("memory.json",), 2, "name a run to compare with memory.json"),
        (("aaaa", "memory.json"), 2, "name the baseline file first, and only one"),
        (("aaaa", "--update"), 2, "--update writes a baseline file: name it first"),
        (
            ("memory.json", "aaaa", "--update", "--fail-if", "trace.peak > 1 GiB"),
            2,
            "--update accepts the runs' figures, and --fail-if judges them: pass only one of them",
        ),
        (
            ("memory.json", "aaaa"),
            1,
            "memory.json has no training 'tiny', only 'large': add it with",
        ),
        (
            ("memory.json", "aaaa", "bbbb"),
            2,
            "have different names (other, tiny): compare them one",
        ),
        (
            ("memory.json", "cccc", "--update"),
            1,
            "run cccc2222 is not finished (failed), so memory.json",
        ),
        (
            ("memory.json", "dddd", "--update"),
            1,
            "run dddd2222 has no figure that is the same in each",
        ),
        (("broken.json", "aaaa"), 2, "broken.json is no baseline file of memlog ("),
        (
            ("newer.json", "aaaa", "--update"),
            2,
            "newer.json is no baseline file of memlog (Invalid",
        ),
        (("no/folder.json", "aaaa", "--update"), 1, "no: No such file or directory"),
    ],
)
def test_a_mistake_gets_one_line(arguments: tuple[str, ...], code: int, says: str) -> None:
    baseline(large={"figures": {"trace.peak": 5}})
    before = Path("memory.json").read_text()
    Path("broken.json").write_text('{"schema": 1, "trainings": {"tiny": {"figures": {"a": "b"}}}}')
    Path("newer.json").write_text('{"schema": 2, "trainings": {}}')
    made("aaaa2222")
    made("bbbb2222", name="other")
    made("cccc2222", end="failed")
    made("dddd2222", peak=None, name=None)
    assert says in complaint("compare", *arguments, code=code)
    assert Path("memory.json").read_text() == before


def test_a_run_without_a_name_has_an_entry_of_its_own() -> None:
    made("aaaa2222", name=None)
    assert memlog("compare", "memory.json", "aaaa", "--update").exit_code == 0
    assert list(json.loads(Path("memory.json").read_text())["trainings"]) == ["training"]
    assert memlog("compare", "memory.json", "aaaa").exit_code == 0


def test_a_gate_on_what_the_baseline_lacks_is_no_pass() -> None:
    made("aaaa2222")
    memlog("compare", "memory.json", "aaaa", "--update")
    result = memlog("compare", "memory.json", "aaaa", "--fail-if", "host.rss > +20%")
    assert result.exit_code == 1
    assert result.stderr.endswith("can't be judged: host.rss is unknown in memory.json\n")


def repeats_of(*sizes: float) -> Baseline:
    return Baseline({"host.rss": list(sizes)})


@pytest.mark.parametrize(
    ("before", "now", "gate", "failed"),
    [
        ((100, 101, 102), (100, 101, 102), "host.rss > +20%", False),
        ((100, 101, 102), (130, 131, 132), "host.rss > +20%", True),
        ((100, 101, 102), (120, 121, 122), "host.rss > +20%", None),
        ((100, 101, 102), (98, 101, 104), "host.rss > +1%", None),
        ((100,), (100, 101, 102), "host.rss > +20%", False),
        ((100, 101, 102), (101,), "host.rss > +20%", False),
        ((100, 100, 100), (101, 101, 101), "host.rss > +0.5%", True),
        ((100, 100, 100), (100, 100, 100), "host.rss > +0%", False),
        ((), (100, 101, 102), "host.rss > 110 B", False),
        ((), (100, 101, 102), "host.rss > 101 B", None),
    ],
)
def test_repeats_are_judged_by_their_interval(
    before: tuple[float, ...], now: tuple[float, ...], gate: str, failed: bool | None
) -> None:
    file = Path("memory.json")
    first = repeats_of(*before).as_run(file, "tiny") if before else None
    result = judge(parse_gate(gate), first, repeats_of(*now).as_run(file, "tiny"))
    assert result.failed is failed
    if failed is None:
        assert "with a confidence of 99 %, and the limit is within: record more repeats" in str(
            result.why
        )


def test_the_interval_is_wrong_as_rarely_as_it_says() -> None:
    """Repeats of the same training, and a limit that their true change meets exactly: the worst case."""
    random = Random(5)  # noqa: S311 - noise is no cryptography
    file = Path("memory.json")
    gate, wrong = parse_gate("host.rss > +1%"), 0
    for _ in range(2000):
        before = repeats_of(*(random.gauss(1000, 5) for _ in range(5))).as_run(file, "tiny")
        now = repeats_of(*(random.gauss(1010, 5) for _ in range(5))).as_run(file, "tiny")
        wrong += judge(gate, before, now).failed is True
    assert 0 < wrong <= 2000 * 0.01


def test_a_trace_that_was_cut_short_is_told() -> None:
    run = MadeRun(Path("runs"), "aaaa2222").write(Batch(at(0), 0, GIB, GIB, "exact"))
    cut = Trace(at(1), 0, "dispatch", False, 9 * MIB, {"parameters": 9 * MIB}, (), 0)
    run.write(Run(at(0), None, None, (), {}), cut, End(at(9), "finished")).closed()
    document = json.loads(output_of("compare", "aaaa", "aaaa", "--json"))
    assert any(
        note.startswith("trace.peak of run aaaa2222 may be too low") for note in document["notes"]
    )


def test_what_one_repeat_lacks_is_unknown() -> None:
    paths = [made("aaaa2222"), made("bbbb2222", peak=None)]
    found = repeated([run_figures(RunDirectory(path)) for path in paths])
    assert found.figures["trace.peak"] is None
    assert found.figures["host.rss"] == GIB
    assert found.repeats["host.rss"] == (GIB, GIB)
    assert found.categories["parameters"] == MIB
