"""Rules by which benchmarks/insight counts a leak as found, named and forecast."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.insight import report
from benchmarks.insight.check_scripts import judge as check
from benchmarks.insight.expected import Expected
from benchmarks.insight.run import Result, run
from benchmarks.insight.scoring import (
    Finding,
    Forecast,
    Score,
    Truth,
    findings_of,
    judge,
    names_place,
    summarise,
)
from benchmarks.insight.series import MIB, Series

SOURCE = "https://github.com/pytorch/pytorch/issues/1"
GROWING = Expected(True, SOURCE, ("kept_graph", "kept_tensors"), ("history",), (1.0, 2.0))
WASTEFUL = Expected(True, SOURCE, ("unowned_gradients",), ("teacher",))
HEALTHY = Expected(False, SOURCE)
FOUND = Finding("kept_graph", "`history` gains one tensor per step", "train.py:31", rate=1.5 * MIB)


def test_a_document_without_findings_has_none() -> None:
    assert findings_of({"schema": 1}) == []
    assert findings_of({"findings": None}) == []


def test_findings_are_read_with_fields_that_are_not_known() -> None:
    written = {"kind": "growth", "rate": 3, "confidence": "low", "new": {}}
    written["forecast"] = {"earliest_step": 10, "latest_step": 20, "limit_bytes": None}
    (finding,) = findings_of({"findings": [written]})
    assert finding.forecast == Forecast(10, 20)
    assert finding.tells_growth


def test_a_right_finding_scores_everywhere() -> None:
    truth = Truth(rate=1.25 * MIB, last_step=100, room=1250 * MIB)
    finding = Finding(
        "kept_graph", "`history` grows", rate=1.5 * MIB, forecast=Forecast(1000, 1400)
    )
    score = judge(GROWING, [finding], truth)
    assert score[:5] == (True, False, True, True, True)
    assert score.rate_error == pytest.approx(0.2)
    assert score.forecast_error == pytest.approx(100 / 1100)


def test_a_second_choice_names_the_cause_and_not_the_best() -> None:
    score = judge(GROWING, [Finding("kept_tensors", rate=1.0)])
    assert (score.cause, score.best_cause, score.place) == (True, False, False)


def test_growth_of_unknown_cause_is_detected_without_cause() -> None:
    score = judge(GROWING, [Finding("growth", rate=1.0)])
    assert (score.detected, score.cause) == (True, False)


def test_a_finding_without_a_rate_does_not_detect_growth() -> None:
    assert judge(GROWING, [Finding("kept_graph", "history")]).detected is False
    assert judge(GROWING, [Finding("kept_graph", rate=0.0)]).detected is False
    assert judge(GROWING, []).detected is False


def test_the_first_finding_with_a_rate_is_judged() -> None:
    score = judge(GROWING, [Finding("larger_steps"), Finding("native_library", rate=1.0), FOUND])
    assert (score.kind, score.cause, score.place) == ("native_library", False, False)


def test_waste_counts_by_kind_and_growth_there_is_a_false_alarm() -> None:
    score = judge(WASTEFUL, [Finding("unowned_gradients", "of the teacher")])
    assert score[:5] == (True, False, True, True, True)
    assert judge(WASTEFUL, [FOUND])[:2] == (False, True)


def test_any_finding_about_a_healthy_script_is_a_false_alarm() -> None:
    assert judge(HEALTHY, [Finding("larger_steps")])[:2] == (None, True)
    assert judge(HEALTHY, [])[:2] == (None, False)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("history", True),
        ("train.py:31", True),
        ("train.py:3", False),
        ("hist", False),
        ("`history`", True),
    ],
)
def test_a_place_is_named_by_a_whole_word(text: str, named: bool) -> None:
    assert names_place(FOUND, [text]) is named


def test_a_place_in_the_evidence_counts() -> None:
    assert names_place(Finding("growth", evidence=("owned by Trainer.losses",)), [".losses"])


def test_the_summary_counts_scripts_and_runs() -> None:
    first = [
        Score(True, False, True, True, True, 0.1, 0.2),
        Score(True, False, False, False, False, 0.3),
        Score(False, False),
        Score(None, True),
        Score(None, False),
    ]
    summary = summarise(first, [Score(None, True), Score(None, False)], [1.02, 1.0, 1.04])
    assert summary.recall == pytest.approx(2 / 3)
    assert summary.precision == pytest.approx(2 / 3)
    assert (summary.cause, summary.best_cause, summary.place) == (0.5, 0.5, 0.5)
    assert summary.rate_error == pytest.approx(0.2)
    assert (summary.forecast_error, summary.forecasts) == (0.2, 1)
    assert (summary.false_alarms, summary.healthy_runs) == (2, 4)
    assert summary.cost == 1.02


def test_the_summary_of_nothing_found_has_no_precision() -> None:
    summary = summarise([Score(False, False)], [], [])
    assert summary.recall == 0.0
    assert summary.precision is summary.cause is summary.cost is None


def test_the_report_has_a_row_per_script_and_tells_failures() -> None:
    table = {"kept": GROWING, "fine": HEALTHY, "broken": HEALTHY}
    results = [
        Result("kept", 0, judge(GROWING, [FOUND]), (FOUND,), cost=1.01, rate=1.5 * MIB),
        Result("fine", 0, judge(HEALTHY, []), cost=1.0),
        Result("fine", 1, judge(HEALTHY, [FOUND]), (FOUND,)),
        Result("broken", 0, None, error="exit code 1"),
    ]
    written = report.text(table, results, seeds=2)
    assert f"| [kept]({SOURCE}) | kept_graph | kept_graph | yes | yes | 1.50 |" in written
    assert f"| [fine]({SOURCE}) | 2 | 1 | kept_graph | 1.00 |" in written
    assert "- broken, seed 0: `exit code 1`" in written
    assert "## Not run" not in written
    shorter = report.text(table, results[:1], seeds=2, not_run=["broken", "fine"])
    assert "Of 3 scripts, 2: broken, fine." in shorter


def test_an_interrupted_run_goes_on_and_runs_failed_scripts_again(tmp_path: Path) -> None:
    done = [
        Result("fine", 1, judge(HEALTHY, [])),
        Result("no_such_script", 0, judge(GROWING, [FOUND]), (FOUND,)),
        Result("fine", 0, judge(HEALTHY, []), verdict="No growth", cost=1.0),
    ]
    keep = tmp_path / "results.jsonl"
    keep.write_bytes(b"\n".join(msgspec.json.encode(result) for result in done) + b"\n")
    table = {"fine": HEALTHY, "no_such_script": GROWING}
    assert run(table, ["fine", "no_such_script"], 2, 1, keep) == [done[2], done[0], done[1]]
    table["nor_this_one"] = GROWING
    *_, failed = run(table, list(table), 2, 1, keep)
    assert failed.name == "nor_this_one"
    assert failed.error
    assert len(keep.read_bytes().splitlines()) == 3


def test_a_series_knows_its_rate() -> None:
    series = Series(tuple(100 * MIB + step * MIB for step in range(200)), 5.0)
    assert series.rate() == pytest.approx(MIB, rel=0.02)
    assert series.growth() == pytest.approx(120 / 180, rel=0.02)
    jump = Series((100 * MIB,) * 20 + (150 * MIB,) * 80, 5.0)
    assert jump.rate() == 0


@pytest.mark.parametrize(
    ("expected", "per_step", "right"),
    [
        (GROWING, 1.5, True),
        (GROWING, 0.1, False),
        (GROWING, 5.0, False),
        (HEALTHY, 0.0, True),
        (HEALTHY, 1.0, False),
    ],
)
def test_the_check_compares_a_series_with_the_table(
    expected: Expected, per_step: float, right: bool
) -> None:
    levels = tuple(int((300 + step * per_step) * MIB) for step in range(100))
    assert (check(expected, Series(levels, 5.0)) == "") is right


def test_the_check_wants_enough_steps() -> None:
    assert "10 steps" in check(HEALTHY, Series((MIB,) * 10, 1.0))
