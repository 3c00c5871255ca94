"""The verdict on a run: the most important finding, or that nothing grew."""

from pathlib import Path

import pytest
from support.journals import GIB, MIB, MadeRun, at, batch

from memlog.events import Batch, End, Evaluation, Finding, OutOfMemory, Sample
from memlog.reports import summarize
from memlog.reports.final_state import final_state
from memlog.reports.oom_diagnosis import Witness
from memlog.reports.postmortem import report
from memlog.reports.verdict import ranked

KEPT = Finding(
    time_us=at(30),
    step=30,
    kind="kept_graph",
    title="`history`, a list in `__main__` (train.py:31), gains one tensor per step",
    where="history",
    since_step=12,
    rate=34 * MIB,
    forecast=(640, 700),
    limit=24 * GIB,
    evidence=("Each keeps the graph of its step alive.",),
    confidence="high",
    remedy="Append `loss.item()` or `loss.detach()`.",
)


def other(kind: str, *, rate: float | None, forecast: tuple[int, int] | None = None) -> Finding:
    return Finding(at(31), 31, kind, kind, kind, 12, rate, forecast, None)


def sample(step: int, limit: int) -> Sample:
    return Sample(at(step), step, GIB, 1, GIB, GIB, None, host_limit=limit)


def verdict(tmp_path: Path, *events: object, finished: bool = True) -> str:
    run = MadeRun(tmp_path).write(*events)
    if finished:
        run.write(End(at(9_000), "finished"))
    return summarize(run.closed()).verdict


def steps(levels: list[int]) -> list[Batch]:
    return [batch(step, level) for step, level in enumerate(levels)]


def test_a_healthy_run_says_so_in_one_line(tmp_path: Path) -> None:
    levels = [GIB // 2] * 12 + [GIB] * 88
    assert verdict(tmp_path, *steps(levels), sample(9, 24 * GIB)) == (
        "No growth: peak 1.0 GiB of 24.0 GiB, steady since step 12."
    )


@pytest.mark.parametrize("count", [100, 5_000])
def test_garbage_that_comes_and_goes_is_steady(tmp_path: Path, count: int) -> None:
    levels = [GIB + step % 5 * 100 * MIB for step in range(count)]
    assert verdict(tmp_path, *steps(levels)).startswith(
        ("No growth: ", "No lasting growth was found")
    )


@pytest.mark.parametrize("count", [60, 5_000])
def test_growth_within_the_tolerance_is_not_called_steady(tmp_path: Path, count: int) -> None:
    levels = [GIB + 8 * MIB * step // count for step in range(count)]
    assert verdict(tmp_path, *steps(levels)).startswith("No lasting growth was found")


def test_growth_that_has_rested_for_a_while_is_not_called_steady(tmp_path: Path) -> None:
    levels = [GIB + 4 * MIB * min(step, 88) for step in range(100)]
    assert verdict(tmp_path, *steps(levels)).startswith("No lasting growth was found")


@pytest.mark.parametrize("at", [5, 30])
def test_a_small_jump_is_steady(tmp_path: Path, at: int) -> None:
    levels = [GIB + 4 * MIB * (step >= at) for step in range(60)]
    assert "steady since step 0" in verdict(tmp_path, *steps(levels))


def test_without_steps_it_says_so(tmp_path: Path) -> None:
    evaluations = [Evaluation(at(call), call, 0.5, GIB) for call in range(100)]
    assert verdict(tmp_path, *evaluations) == "Without steps, growth is not judged: peak 1.0 GiB."


def test_nothing_is_claimed_of_too_few_steps(tmp_path: Path) -> None:
    assert (
        verdict(tmp_path, *steps([GIB] * 4)) == "Too few steps to judge growth (4): peak 1.0 GiB."
    )


def test_levels_that_rise_are_not_called_steady(tmp_path: Path) -> None:
    levels = [GIB + step * 20 * MIB for step in range(100)]
    assert verdict(tmp_path, *steps(levels)) == (
        "No lasting growth was found in 100 steps: peak 2.9 GiB."
    )


def test_a_finding_is_the_verdict(tmp_path: Path) -> None:
    assert verdict(tmp_path, *steps([GIB] * 40), KEPT) == (
        "`history`, a list in `__main__` (train.py:31), gains one tensor per step. Memory grows by 34.0 MiB "
        "a step since step 12, and memory runs out at step 640 to 700 (24.0 GiB)."
    )


def test_how_the_run_ended_comes_first(tmp_path: Path) -> None:
    unknown = (None,) * 5
    failure = OutOfMemory(at(50), 39, "host", 2 * GIB, 0, 24 * GIB, *unknown, "MemoryError")
    run = MadeRun(tmp_path).write(*steps([GIB] * 40), KEPT, failure, End(at(60), "failed")).closed()
    text = summarize(run).verdict
    assert text.startswith(
        "Out of memory on the host after step 39, 2.0 GiB requested. `history`, a list"
    )
    written = report(final_state(run), Witness(writer="helper")).text.splitlines()
    assert written[2].startswith("**`history`, a list in `__main__`")
    assert any("Append `loss.item()`" in line for line in written[3:8])


def test_what_reaches_its_limit_first_comes_first() -> None:
    slow, fast = other("kept_tensors", rate=MIB), other("worker_process", rate=9 * MIB)
    unknown = other("growth", rate=99 * MIB)
    gradients = other("unowned_gradients", rate=None)
    soon = other("shared_memory", rate=1, forecast=(50, 60))
    assert [one.kind for one in ranked([gradients, slow, unknown, fast, soon, slow])] == [
        "shared_memory",
        "worker_process",
        "kept_tensors",
        "growth",
        "unowned_gradients",
    ]
