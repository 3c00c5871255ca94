"""A first checkpoint that does not fit is a finding, if the way of saving is known and memory stays short."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from support.journals import GIB, at, batch

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event, Finding, Phase, Sample, SavedState, SavedTensors
from memlog.facts.judge import RunJudge
from memlog.facts.later_memory import saving_costs
from memlog.facts.verdict import verdict

MODEL = SavedTensors(0, 14 * GIB, GIB, 14 * GIB, 0, 16 * GIB, 0, 14 * GIB, 0, 0)
STATE = SavedState(
    at(0.1), 0, MODEL, replace(MODEL, device=27 * GIB, buffered=28 * GIB), whole_model=True
)
LIGHTNING = replace(STATE, way="lightning", first_at=1000)


def sample(step: int) -> Sample:
    return Sample(at(step), step, GIB, 1, None, None, None)


def judged(events: Sequence[Event], free: Sequence[int | None]) -> tuple[list[Finding], RunJudge]:
    """Return what is found if these are the bytes that are free, read one after the other."""
    left, found = iter([None, *free]), list[Event]()  # the judge of growth asks first
    judge = RunJudge(found.append, lambda _: None, lambda: next(left), Diagnostics())
    for event in events:
        judge.take(event)
    for event in found:
        judge.facts.take(event)
    return [each for each in found if isinstance(each, Finding)], judge


STEPS = [event for step in range(6) for event in (batch(step, GIB), sample(step))]


def test_what_does_not_fit_is_found_once() -> None:
    [found], judge = judged([LIGHTNING, *STEPS], [18 * GIB] * 3)
    assert found.title == (
        "The first checkpoint at step 1,000 needs 42.0 GiB of host memory; 18.0 GiB are free"
    )
    assert found.evidence[0].startswith(
        "Trainer (Lightning) saves 14.0 GiB of the model and 27.0 GiB"
    )
    assert "torch.save(checkpoint, path): that takes 1.0 GiB." in (found.remedy or "")
    assert verdict(judge.facts, "running").text == f"{found.title}."
    needed = {cost.way: cost.host for cost in saving_costs(LIGHTNING)}
    assert needed["lightning"] == 42 * GIB


def test_the_transformers_trainer_saves_the_weights_and_then_the_state() -> None:
    state = replace(STATE, way="transformers_trainer")
    assert judged([state, *STEPS], [15 * GIB] * 6)[0] == []
    [found], _ = judged([state, *STEPS], [13 * GIB] * 3)
    assert found.title.startswith(
        "The first checkpoint needs 14.0 GiB of host memory; 13.0 GiB are"
    )
    assert "max_shard_size" in (found.remedy or "")


def test_what_the_program_does_already_is_no_remedy() -> None:
    empty = replace(MODEL, device=0, largest=0, buffered=0, copied=0, undivided=0)
    weights = replace(LIGHTNING, optimizer=empty)
    assert "save_weights_only" in (judged([LIGHTNING, *STEPS], [GIB] * 3)[0][0].remedy or "")
    [found], _ = judged([weights, *STEPS], [GIB] * 3)
    assert (found.remedy or "").endswith("that takes 1.0 GiB.")
    files = replace(STATE, way="transformers_trainer", shard=10**9)
    assert judged([files, *STEPS], [2 * GIB] * 6)[0] == []
    [found], _ = judged([files, *STEPS], [GIB // 2] * 3)
    assert found.remedy is None


@pytest.mark.parametrize(
    "free",
    [
        [43 * GIB] * 6,
        [18 * GIB, 18 * GIB, 43 * GIB] * 2,
        [None] * 6,
        [18 * GIB, None, 18 * GIB, 18 * GIB, None, 18 * GIB],
    ],
    ids=["enough", "short for a moment", "unknown", "often unknown"],
)
def test_there_is_no_alarm_if_memory_may_suffice(free: Sequence[int | None]) -> None:
    assert judged([LIGHTNING, *STEPS], free)[0] == []


def test_there_is_no_alarm_if_the_way_is_not_evident() -> None:
    assert judged([STATE, *STEPS], [GIB] * 6)[0] == []
    sharded = replace(MODEL, gathered=GIB, whole=100 * GIB)
    assert judged([replace(LIGHTNING, model=sharded), *STEPS], [GIB] * 6)[0] == []


def test_after_the_first_save_there_is_no_finding_any_more() -> None:
    saved = Phase(at(9), "checkpoint", (), 10, GIB, GIB, "exact", ())
    assert judged([LIGHTNING, saved, *STEPS], [])[0] == []
    [_], judge = judged([LIGHTNING, *STEPS], [18 * GIB] * 3)
    judge.facts.take(replace(saved, error="OutOfMemoryError"))
    assert len(judge.facts.findings("failed")) == 1
    judge.facts.take(saved)
    assert judge.facts.findings("running") == []
    judge.facts.take(LIGHTNING)  # another training of the same run
    assert len(judge.facts.findings("running")) == 1
