"""Generated programs of benchmarks/insight are valid and varied, and their scores follow the rules."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.insight import report as page
from benchmarks.insight.expected import KINDS
from benchmarks.insight.generated.holders import HOLDERS
from benchmarks.insight.generated.programs import PERIODS, Program, Variant, program
from benchmarks.insight.generated.report import put_into, text
from benchmarks.insight.generated.run import Result
from benchmarks.insight.generated.scoring import Said, fix_of, judge
from benchmarks.insight.generated.things import MIB, THINGS
from benchmarks.insight.scoring import Finding

ALL = len(HOLDERS) * len(PERIODS)
PROGRAMS = [program(1, number) for number in range(ALL)]
TENSORS = next(i for i, thing in enumerate(THINGS) if thing.name == "random tensors")
GRAPHS = next(i for i, thing in enumerate(THINGS) if thing.sort == "graph")
PLAIN = PROGRAMS[0]._replace(thing=TENSORS, period=50, times=14, rate=MIB)
RISES: dict[Variant, float] = {"leak": 100.0, "bounded": 0.0}
REMEDY = "Remove old elements, or limit its length."


def finding(title: str = f"`{PLAIN.name}`, a list, gains one tensor", **others: object) -> Finding:
    values = {"kind": "kept_tensors", "rate": 1.0, "remedy": REMEDY, **others}
    return Finding(title=title, **values)  # type: ignore[arg-type]


def test_the_same_numbers_give_the_same_program_and_others_another_one() -> None:
    assert PROGRAMS[7] == program(1, 7)
    assert len({each.text("leak") for each in PROGRAMS}) == ALL
    assert program(2, 7).text("leak") != PROGRAMS[7].text("leak")


def test_every_holder_meets_every_period() -> None:
    assert {(each.holder, each.period) for each in PROGRAMS} == {
        (holder, period) for holder in HOLDERS for period in PERIODS
    }
    assert {each.trainer for each in PROGRAMS} == {"plain", "Lightning", "HF"}
    assert {each.end for each in PROGRAMS} == {"finish", "kill"}
    assert {each.kept.name for each in PROGRAMS} == {thing.name for thing in THINGS}


@pytest.mark.parametrize("variant", get_args(Variant))
def test_programs_compile_and_know_nothing_of_memlog(variant: Variant) -> None:
    for each in PROGRAMS:
        for is_short in (False, True):
            written = each.text(variant, is_short=is_short)
            assert ast.get_docstring(ast.parse(written))
            assert "memlog" not in written
            assert written.count(each.name) >= 2
            assert ("SIGKILL" in written) == (each.end == "kill" and not is_short)


def test_a_twin_differs_from_its_program_in_what_it_keeps() -> None:
    for each in PROGRAMS:
        leak, twin = (set(each.text(variant).splitlines()) for variant in ("leak", "bounded"))
        assert 1 <= len(twin - leak) <= 6


def test_programs_keep_what_one_machine_can_hold() -> None:
    assert all(64 * MIB <= each.rate * each.steps <= 1100 * MIB for each in PROGRAMS)
    assert all(each.limit <= each.times // 3 for each in PROGRAMS)


def test_all_kinds_of_causes_exist() -> None:
    assert {kind for thing in THINGS for kind in thing.kinds} <= KINDS


@pytest.mark.parametrize(
    ("remedy", "fix"),
    [
        (REMEDY, "bounded"),
        ("Remove what is no longer needed, limit its length, or keep `.item()`.", "bounded"),
        ("Give the cache a limit (`functools.lru_cache(maxsize=…)`).", "bounded"),
        ("Append `loss.item()` or `loss.detach()`.", "detached"),
        ("Run the evaluation under `torch.no_grad()`, or append `.detach()`.", "detached"),
        ("Run some steps with `heaptrack python …`.", None),
        ("Set MALLOC_ARENA_MAX=2.", None),
        (None, None),
    ],
)
def test_a_remedy_asks_for_a_fix(remedy: str | None, fix: str | None) -> None:
    assert fix_of(remedy) == fix


def test_a_right_finding_scores_everywhere() -> None:
    score = judge(PLAIN, Said((finding(),), named_at=300), Said(), RISES)
    assert score == (True, True, True, True, True, True, False, False, ())


def test_growth_without_a_holder_is_found_and_no_more() -> None:
    unknown = finding("The process's memory grows", kind="growth", remedy=None)
    score = judge(PLAIN, Said((unknown,)), Said(), RISES)
    assert score[:4] == (True, False, False, False)
    assert score.why == ("holder not named (growth)",)


def test_a_holder_that_only_the_evidence_has_is_not_named() -> None:
    other = finding("`cache`, a dict, gains one tensor", evidence=(f"`{PLAIN.name}` refers to it",))
    assert not judge(PLAIN, Said((other,)), Said(), RISES).named


def test_a_remedy_is_judged_by_the_growth_that_it_removes() -> None:
    graphs = PLAIN._replace(thing=GRAPHS)
    said = Said((finding(kind="kept_graph", remedy="Append `loss.detach()`."),), named_at=300)
    for left, is_right in ((15.0, True), (25.0, False)):
        rises: dict[Variant, float] = {**RISES, "detached": left}
        assert judge(graphs, said, Said(), rises).remedy is is_right
    assert not judge(PLAIN, said, Said(), RISES).remedy, "tensors without a graph"


def test_a_leak_is_named_late_after_six_periods_if_it_has_taken_much() -> None:
    said = Said((finding(),), named_at=351, free=100 * PLAIN.rate)
    assert judge(PLAIN, said, Said(), RISES).why == ("named late, at step 351",)
    much_is_free = said._replace(free=20 * 351 * PLAIN.rate)
    score = judge(PLAIN, much_is_free, Said(), RISES)
    assert (score.soon, score.early) == (False, True)


def test_a_finding_about_a_twin_is_a_false_alarm_unless_it_is_true() -> None:
    evaluates = finding(kind="forward_without_backward", rate=None)
    graphs = PLAIN._replace(thing=GRAPHS)
    assert judge(PLAIN, Said(), Said((evaluates,)), RISES).false_alarm
    assert not judge(graphs, Said(), Said((evaluates,)), RISES).false_alarm
    assert judge(graphs, Said(), Said((finding(),)), RISES).false_alarm


def test_memlog_can_be_unsure_of_a_twin() -> None:
    twin = Said(verdict="Unsure: memory rose by 20 MiB in 472 steps.")
    assert judge(PLAIN, Said(), twin, RISES).unsure
    assert not judge(PLAIN, Said(), Said(verdict="No growth."), RISES).unsure


def result(chosen: Program, said: Said) -> Result:
    return Result(chosen, said, Said(), judge(chosen, said, Said(), RISES))


def test_the_report_has_a_matrix_and_every_failure(tmp_path: Path) -> None:
    found = result(PLAIN, Said((finding(),), named_at=300))
    missed = result(PROGRAMS[1], Said())
    failed = Result(PROGRAMS[2], Said(), Said(), None, "exit code 1")
    written = text([found, missed, failed])
    assert "| leak found | 50% | 95 % |" in written
    assert "1·1·1 of 1" in written
    assert "0·0·0 of 1" in written
    assert f"- 1:{PROGRAMS[1].number} (" in written
    assert "exit code 1" in written


def test_parts_of_the_page_do_not_remove_each_other(tmp_path: Path) -> None:
    file = tmp_path / "insight.md"
    page.put_into(file, "old scripts", "cpu")
    markers = "<!-- result of make leaks -->\n\n<!-- end of the result of make leaks -->"
    file.write_text(f"{file.read_text()}\n{page.GENERATED}\n{markers}\n")
    put_into(file, "old tables")
    page.put_into(file, "on a device", "cuda")
    page.put_into(file, "scripts again", "cpu")
    put_into(file, "tables again")
    written = file.read_text()
    expected = ["scripts again", page.ON_DEVICE, "on a device", page.GENERATED, "tables again"]
    places = [written.index(each) for each in expected]
    assert places == sorted(places)
    assert "old " not in written


def test_a_variable_that_is_bound_again_is_local_or_declared_global() -> None:
    for each in PROGRAMS:
        if HOLDERS[each.holder][each.which].rebinds:
            assert (f"global {each.name}" in each.text("leak")) is not each.is_local
