"""A traced step compared with the run's others, in ``memlog advise`` and in a post-mortem report."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from support.journals import GIB, MIB, MadeRun, at, batch, cuda
from support.training import CASES, traced

from memlog.cli.main import cli
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.events import Batch, OutOfMemory
from memlog.journal import RunDirectory
from memlog.reports.worst_step import (
    LargerStep,
    Standing,
    advise_on,
    not_the_largest,
    read_worst_step,
)
from memlog.trace.predict import advise
from memlog.trace.records import RecordedTrace
from memlog.tracer.schedule.kept_trace import trace_event


@cache
def trace() -> RecordedTrace:
    return traced(CASES["mlp"])


def needs() -> int:
    return trace().result.peak or 0


def a_run(
    root: Path,
    *batches: Batch,
    traced_at: tuple[int | None, ...] = (0,),
    asked: int = MIB,
    resident: int | None = None,
) -> RunDirectory:
    """A failed run whose first traced step was the worst."""
    events = [trace_event(trace().result, step) for step in traced_at]
    lost = OutOfMemory(at(9), 7, "host", asked, 0, None, None, None, None, None, "backward", "gone")
    lost = msgspec.structs.replace(lost, resident=resident)
    directory = MadeRun(root).write(*batches, *events, lost).closed()
    directory.worst_step.write_bytes(msgspec.msgpack.encode((events[0], trace())))
    return directory


def growing(by: int, steps: int = 20) -> list[Batch]:
    return [batch(step, 300 * MIB + step * by) for step in range(steps)]


def advise_output(root: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setenv("MEMLOG_DIR", str(root))
    result = CliRunner().invoke(cli, ["advise", "latest", *options], prog_name="memlog")
    assert result.exit_code == 0, result.output
    return result.stdout


def of(run: RunDirectory) -> Standing:
    return advise_on(run, *read_worst_step(run))[1]


def test_growth_after_the_traced_step_is_reported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path, *growing(20 * MIB), asked=20 * MIB)
    lines = advise_output(tmp_path, monkeypatch).splitlines()
    assert lines[0].endswith("the only step that was traced")
    assert (
        "The run's largest step was 19: the process held 680.0 MiB there, and 300.0 MiB" in lines[1]
    )
    assert "It was not traced" in lines[1]
    assert "memlog.MemoryTracer traces a step" in lines[1]
    document = json.loads(advise_output(tmp_path, monkeypatch, "--json"))
    larger = {"step": 19, "held": 680 * MIB, "traced": False, "inputs": None}
    assert document["standing"] == {"traced_steps": 1, "held": 300 * MIB, "larger": larger}


def explained(run: RunDirectory) -> str:
    """Return the advice of the post-mortem report."""
    explain_afterwards(run)
    return (run.artifacts / "postmortem.md").read_text().partition("## What would help")[2]


def test_no_saving_is_predicted_from_a_step_that_was_not_the_largest(tmp_path: Path) -> None:
    jump = [batch(step, (300 if step < 10 else 680) * MIB) for step in range(20)]
    text = explained(a_run(tmp_path / "jump", *jump))
    assert "No saving is predicted" in text
    assert "The run's largest step was 10: the process held 680.0 MiB there" in text
    assert "a peak of about" not in text
    assert "a peak of about" in explained(a_run(tmp_path / "alike", *growing(0)))


def test_the_step_that_ran_out_of_memory_is_one_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step did not end, so only the failure tells the memory in use."""
    run = a_run(tmp_path, *growing(0), resident=900 * MIB)
    assert of(run).larger == LargerStep(20, 900 * MIB, False)
    assert "The run's largest step was 20: the process held 900.0 MiB" in advise_output(
        tmp_path, monkeypatch
    )
    assert "a peak of about" not in explained(run)


def test_an_older_mark_says_nothing_of_the_failed_step(tmp_path: Path) -> None:
    begun_high = [Batch(at(n), n, 300 * MIB, 900 * MIB, "watermark") for n in range(20)]
    assert of(a_run(tmp_path, *begun_high, resident=900 * MIB)).larger is None


def test_where_the_larger_step_was_traced_too_something_else_holds_the_rest(tmp_path: Path) -> None:
    run = a_run(tmp_path, *growing(20 * MIB), traced_at=(0, 19))
    sentence = not_the_largest(of(run), 0, advise(trace()))
    assert sentence is not None
    assert "was traced, too, and its tensors took no more" in sentence


@pytest.mark.parametrize(
    "batches",
    [
        growing(0),
        growing(MIB // 4),  # what a process gains as it gets warm
        [batch(0, 700 * MIB), *growing(0)[1:]],  # the traced step itself
        [Batch(at(n), n, 300 * MIB, 900 * MIB, "watermark") for n in range(20)],  # before the run
        [batch(step, None) for step in range(20)],
        [],
    ],
)
def test_no_growth_is_reported_for_a_steady_run(tmp_path: Path, batches: list[Batch]) -> None:
    assert of(a_run(tmp_path, *batches)).larger is None


def test_what_the_watermark_may_have_covered_is_no_larger_step(tmp_path: Path) -> None:
    """The traced step may have had as much; this is unknown."""
    bounded = Batch(at(0), 0, 300 * MIB, 900 * MIB, "watermark")
    run = a_run(tmp_path, bounded, *growing(20 * MIB)[1:])
    assert of(run).larger is None


def test_a_step_that_was_never_over_is_the_last(tmp_path: Path) -> None:
    standing = of(a_run(tmp_path, *growing(20 * MIB), traced_at=(None,)))
    assert standing == Standing(1, 680 * MIB, None)


def test_a_device_is_judged_by_its_own_allocator(tmp_path: Path) -> None:
    batches = [batch(step, GIB, cuda(100 * MIB + step * 20 * MIB)) for step in range(10)]
    run = a_run(tmp_path, *batches)
    event, found = read_worst_step(run)
    on_a_device = msgspec.structs.replace(
        found, result=msgspec.structs.replace(found.result, device="cuda:0")
    )
    advice, standing = advise_on(run, event, on_a_device)
    assert standing.held == 100 * MIB
    assert "cuda:0 held 280.0 MiB there" in (not_the_largest(standing, 0, advice) or "")


def test_no_hint_saves_less_than_a_hundredth_of_what_the_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "small", *[batch(step, 2 * needs()) for step in range(8)])
    few = a_run(tmp_path / "large", *[batch(step, 15 * needs()) for step in range(8)])
    none = a_run(tmp_path / "huge", *[batch(step, 400 * needs()) for step in range(8)])
    hints = {one.what: one for one in advise_on(run, *read_worst_step(run))[0].hints}
    kept = {one.what for one in advise_on(few, *read_worst_step(few))[0].hints}
    assert kept == {what for what, one in hints.items() if one.saved >= 0.15 * needs()}
    assert 0 < len(kept) < len(hints)
    assert not advise_on(none, *read_worst_step(none))[0].hints
    assert "would save 1% or more of the" in advise_output(tmp_path / "huge", monkeypatch)
    text = explained(few)
    assert all((f"{what}: a peak of about" in text) == (what in kept) for what in hints)
    assert "a peak of about" not in explained(none)
