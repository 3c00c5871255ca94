"""Facts about a run: how many steps, what a search had found when the run was killed, what is in doubt."""

import pytest
from msgspec.structs import replace
from support.journals import MIB, at, cuda

from memlog.events import (
    Alert,
    Batch,
    Device,
    End,
    Event,
    Finding,
    Health,
    Inquiry,
    OutOfMemory,
    Trace,
)
from memlog.facts.oom_cause import OUT_OF_MEMORY
from memlog.facts.run_fold import RunFold
from memlog.facts.verdict import verdict

SUSPECT = Finding(
    at(5), 50, "kept_tensors", "`kept` (train.py:9) grows", "train.py:9", 3, 2.0 * MIB, None, None
)


def folded(*events: Event) -> RunFold:
    facts = RunFold()
    for event in events:
        facts.take(event)
    return facts


def step(number: int, level: float) -> Batch:
    size = int(level * MIB)
    return Batch(at(number / 10), number, size + 99 * MIB, None, None, (), size)


def growing(steps: int, rate: float = 2.0) -> list[Batch]:
    return [step(number, 300 + rate * number) for number in range(steps)]


def inquiry(number: int, *suspects: Finding, searching: bool = False) -> Inquiry:
    return Inquiry(at(number / 10), number, "host.anon", searching, suspects)


def trace(number: int, peak: int, *, exact: bool = True, kept: bool | None = None) -> Trace:
    return Trace(at(number), number, "cpu", exact, peak * MIB, {}, (), None, kept=kept)


def test_steps_without_an_event_of_their_own_count() -> None:
    events = [step(number, 300) for number in range(0, 95, 10)]
    assert folded(*events, Health(at(10), 94, 0.1, 1.0, {}, {}, steps=95)).steps == 95


def test_a_run_that_begins_at_step_1000_has_the_steps_that_it_made() -> None:
    facts = folded(*[step(number, 300) for number in range(1000, 1010)])
    assert (facts.steps, facts.first_step, facts.last_step) == (10, 1000, 1009)


def test_growth_until_a_kill_is_found_like_growth_until_an_end() -> None:
    facts = folded(*growing(150))
    (finding,) = facts.findings("killed")
    assert (finding.kind, finding.confidence) == ("growth", "high")
    assert "The run ended before memlog had searched for the cause." in finding.evidence
    assert verdict(facts, "killed").text.startswith(
        "Ended unexpectedly after step 149. The process's memory grows by 2.0 MiB a step since step 0"
    )


def test_growth_over_few_steps_until_a_kill_is_unsure_and_named() -> None:
    found = verdict(folded(*growing(50)), "killed")
    assert (found.outcome, found.rises) == ("unsure", True)
    assert "memory grew by 2.0 MiB a step since step 0" in found.text


def test_what_a_search_had_found_is_the_cause_if_the_run_was_killed() -> None:
    facts = folded(*growing(60), inquiry(60, SUSPECT))
    (finding,) = facts.findings("killed")
    assert finding.title == SUSPECT.title
    assert finding.evidence[-1].startswith("The run ended before memlog had confirmed this")
    assert facts.findings("running") == facts.findings("finished") == []


def test_a_suspect_of_an_early_search_has_the_rate_of_the_whole_growth() -> None:
    rough = replace(SUSPECT, since_step=17, rate=5.1 * MIB)
    (finding,) = folded(*growing(150), inquiry(30, rough)).findings("killed")
    assert (finding.title, finding.rate, finding.since_step) == (SUSPECT.title, 2.0 * MIB, 0)


def test_a_suspect_of_unjudged_growth_has_the_rate_until_the_end() -> None:
    rough = replace(SUSPECT, since_step=17, rate=5.1 * MIB)
    levels = [step(number, 300 + 2.0 * number + (number % 2) * 30) for number in range(45)]
    facts = folded(*levels, inquiry(30, rough))
    assert facts.growth("killed") == {}
    (finding,) = facts.findings("killed")
    assert finding.rate == pytest.approx(2.0 * MIB, rel=0.1)


def test_no_all_clear_if_the_last_steps_are_lost() -> None:
    steady = [step(number, 300) for number in range(750)]
    health = Health(at(300), 2999, 0.1, 1.0, {"journal_write": 2245}, {}, steps=3000)
    found = verdict(folded(*steady, health), "finished")
    assert found.outcome == "unsure"
    assert "steps after step 749 are lost" in found.text
    few = Health(at(300), 759, 0.1, 1.0, {"journal_write": 10}, {}, steps=760)
    assert verdict(folded(*steady, few), "finished").outcome == "steady"


def test_growth_whose_holder_was_confirmed_is_one_finding() -> None:
    confirmed = replace(SUSPECT, memory="host")
    facts = folded(*growing(150), inquiry(60, searching=True), confirmed, inquiry(61))
    assert [each.kind for each in facts.findings("killed")] == ["kept_tensors"]
    elsewhere = replace(confirmed, memory="cuda0")
    small = replace(confirmed, rate=0.4 * MIB)
    for other in (elsewhere, small):
        kinds = [each.kind for each in folded(*growing(150), other).findings("killed")]
        assert kinds == ["kept_tensors", "growth"]


def test_a_suspect_that_was_withdrawn_does_not_count() -> None:
    facts = folded(*growing(60), inquiry(60, SUSPECT), inquiry(62))
    assert all(one.title != SUSPECT.title for one in facts.findings("killed"))


def test_a_suspect_does_not_count_if_memory_became_steady() -> None:
    still = [step(number, 420) for number in range(60, 400)]
    assert folded(*growing(60), inquiry(60, SUSPECT), *still).findings("killed") == []


def test_a_run_that_ended_itself_has_been_judged_already() -> None:
    facts = folded(*growing(150), inquiry(60, SUSPECT), End(at(20), "failed"))
    assert facts.findings("failed") == []
    assert verdict(facts, "failed").outcome == "unsure"


def test_what_the_search_itself_takes_is_no_growth() -> None:
    before = [step(number, 300) for number in range(40)]
    during = [step(number, 360) for number in range(40, 60)]
    after = [step(number, 320) for number in range(60, 300)]
    facts = folded(*before, inquiry(39, searching=True), *during, inquiry(59), *after)
    assert facts.findings("killed") == []


def test_the_worst_traced_step_is_exact_before_it_is_large() -> None:
    facts = folded(trace(5, 100), trace(30, 120, exact=False), trace(40, 99))
    assert facts.traces.worst == trace(5, 100)


def test_the_worst_traced_step_is_the_one_whose_allocations_are_kept() -> None:
    facts = folded(
        trace(0, 90, kept=True), trace(2, 89, kept=True), trace(9, 95, exact=False, kept=False)
    )
    assert facts.traces.worst is not None
    assert facts.traces.worst.step == 2


def test_the_verdict_on_a_failed_allocation_is_the_reports_title_and_the_memory_in_use() -> None:
    unknown = (None, None, None)
    failure = OutOfMemory(
        at(1), 1, "cuda0", MIB, 0, 9 * MIB, None, 8 * MIB, *unknown, "CUDA out of memory"
    )
    title = "Out of memory on cuda0 after step 1, 1.0 MiB requested: why"
    others, own = (
        Alert(at(2), 1, "error", OUT_OF_MEMORY, text, "told in postmortem.md")
        for text in (f"rank 1: {title}", title)
    )
    said = verdict(folded(step(0, 300), step(1, 300), failure, own, others), "failed").text
    assert said == f"{title}. Too few steps to judge growth (2): peak 8.0 MiB of 9.0 MiB."
    said = verdict(folded(step(0, 300), step(1, 300), failure), "finished").text
    assert said.startswith(
        "Out of memory on cuda0 after step 1, 1.0 MiB requested, which the program caught. Too few steps"
    )
    said = verdict(folded(step(0, 300), failure, step(1, 300)), "finished").text
    assert said.startswith("Too few steps")


@pytest.mark.parametrize("steps", [8, 60])
def test_of_two_memories_that_rise_the_one_that_rises_most_is_told(steps: int) -> None:
    rises = [
        replace(step(number, 300 + number), devices=(cuda(round(10 * MIB * 1.1**number)),))
        for number in range(steps)
    ]
    found = verdict(folded(Device(at(0), "cuda0", "a GPU", 8 * 1024 * MIB), *rises), "finished")
    assert found.outcome == ("too few steps" if steps < 10 else "unsure")
    assert "memory on cuda0 rose by" in found.text
    flat = [replace(each, devices=(cuda(10 * MIB),)) for each in rises]
    assert "host memory rose by" in verdict(folded(*flat, End(at(99), "finished")), "finished").text
