"""``memlog advise``, and the same predictions in a post-mortem report."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
from support.commands import memlog
from support.journals import GIB, MIB, MadeRun, at, batch
from support.training import CASES, traced

from memlog._internal.terminal import format_bytes
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.events import Event, OutOfMemory, StepInputs, TensorInput
from memlog.journal import RunDirectory
from memlog.reports.final_state import final_state
from memlog.reports.oom_diagnosis import Witness
from memlog.reports.postmortem import report
from memlog.trace.predict import advise
from memlog.trace.records import RecordedTrace
from memlog.tracer.schedule.kept_trace import trace_event

pytestmark = pytest.mark.usefixtures("plain_environment")


@cache
def trace() -> RecordedTrace:
    return traced(CASES["gpt"])


def traced_run(root: Path) -> RunDirectory:
    """A run that ran out of memory, and whose worst step was traced."""
    event = trace_event(trace().result, 7)
    held = 2 * (trace().result.peak or 0)
    run = MadeRun(root).write(*(batch(step, held) for step in range(8)), event)
    run.write(
        OutOfMemory(
            at(1), 7, "host", MIB, 0, None, None, None, None, "blocks.1", "forward", "no memory"
        )
    )
    directory = run.closed()
    directory.worst_step.write_bytes(msgspec.msgpack.encode((event, trace())))
    return directory


@pytest.mark.seed(166)
def test_it_says_what_holds_the_memory_and_what_would_help(tmp_path: Path) -> None:
    traced_run(tmp_path)
    result = memlog("advise", "latest")
    assert result.exit_code == 0, result.output
    advice = advise(trace(), 2 * (trace().result.peak or 0))
    step = f"step 7: {format_bytes(advice.traced_peak)} at the peak on cpu, the only step that was traced"
    assert step in result.stdout
    lines = {line.split("  ")[0]: line for line in result.stdout.splitlines()}
    held = advice.categories["activations"]
    assert format_bytes(held) in lines["activations"]
    assert "blocks.3.mlp.0 (activations)" in lines
    for hint in advice.hints:
        line = lines[hint.what.replace("`", "")]
        time = "" if hint.time is None else f"{hint.time:.0%}"
        assert line.endswith(f"{format_bytes(hint.saved)}, {hint.share:.0%} {time:>11}".rstrip())
        assert format_bytes(hint.peak) in line
    [checkpointing] = [hint for hint in advice.hints if hint.kind == "checkpointing"]
    assert 0 < (checkpointing.time or 0) < 1
    kinds = {"batch", "accumulation", "checkpointing", "precision", "optimizer"}
    assert {hint.kind for hint in advice.hints} == kinds


def test_the_document_is_stable(tmp_path: Path) -> None:
    run = traced_run(tmp_path)
    document = json.loads(memlog("advise", "latest", "--json").stdout)
    fields = {"schema", "run", "step", "advice", "standing", "longest_batch", "fit"}
    assert set(document) == fields
    assert document["fit"] is None
    assert (document["schema"], document["run"], document["step"]) == (1, run.id, 7)
    advice = document["advice"]
    named = "device engine traced_peak peak categories layers hints notes is_lower_bound"
    assert set(advice) == set(named.split())
    assert set(advice["layers"][0]) == {"path", "at_peak", "largest"}
    assert set(advice["hints"][0]) == {"kind", "what", "peak", "saved", "share", "modules", "time"}
    held = 2 * (trace().result.peak or 0)
    assert msgspec.json.encode(advise(trace(), held), order="sorted") == msgspec.json.encode(
        advice, order="sorted"
    )
    assert document["standing"] == {"traced_steps": 1, "held": held, "larger": None}


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path: Path) -> None:
    MadeRun(tmp_path).write(batch(0, GIB)).closed()
    result = memlog("advise", "latest")
    assert result.exit_code == 1
    assert result.stderr.startswith("memlog: no step of run k7m2xq9a was traced: train with ")


def test_a_post_mortem_report_has_the_same_predictions(tmp_path: Path) -> None:
    run = traced_run(tmp_path)
    explain_afterwards(run)
    text = (run.artifacts / "postmortem.md").read_text()
    for hint in advise(trace(), 2 * (trace().result.peak or 0)).hints:
        assert f"- {hint.sentence()}\n" in text
    assert "These peaks are predicted from step 7, the only step that was traced" in text


def test_without_the_traces_events_a_report_has_no_figures(tmp_path: Path) -> None:
    run = traced_run(tmp_path)
    run.worst_step.unlink()
    text = report(final_state(run), Witness("sync")).text
    assert "half the batch needs about half of that" in text
    assert "predicted" not in text


def whole_run(root: Path, *more: Event) -> RunDirectory:
    """A run whose step 7 was traced, and that held twice the bytes of its tensors."""
    event = trace_event(trace().result, 7)
    held = 2 * (trace().result.peak or 0)
    inputs = StepInputs(at(1), 7, "host", held, (TensorInput("text", (16, 64), "int64"),))
    steps = [batch(step, held) for step in range(8)]
    directory = MadeRun(root).write(*steps, event, inputs, *more).closed()
    directory.worst_step.write_bytes(msgspec.msgpack.encode((event, trace())))
    return directory


def test_a_plan_names_the_changes_and_their_code(tmp_path: Path) -> None:
    whole_run(tmp_path)
    peak = trace().result.peak or 0
    result = memlog("advise", "latest", "--fit", f"{1.9 * peak / 1024:.0f} KiB")
    assert result.exit_code == 0, result.output
    lines = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines()}
    assert lines["step 7"][-5:] == [
        *format_bytes(peak).split(),
        *format_bytes(2 * peak).split(),
        "no",
    ]
    assert lines["+ gradient accumulation: 2 parts of 8"][-1] == "yes"
    assert f"and {format_bytes(peak)} for the rest of what the process held" in result.stdout
    assert "    (loss / 2).backward()\n" in result.stdout


def test_the_plan_in_the_document(tmp_path: Path) -> None:
    whole_run(tmp_path)
    result = memlog("advise", "latest", "--json", "--fit", "1 MiB")
    assert result.exit_code == 1
    fit = json.loads(result.stdout)["fit"]
    assert set(fit) == {"plan", "why_none", "unsure"}
    assert (fit["why_none"], fit["unsure"]) == (None, [])
    named = (
        "memory fits parts checkpointed autocast one_by_one on_host steps operations without code"
    )
    named += " optimizer time remarks sharded parameters_on_host ranks moved host"
    assert set(fit["plan"]) == set(named.split())
    assert set(fit["plan"]["steps"][0]) == {"change", "peak", "needed", "fits"}
    assert (fit["plan"]["memory"], fit["plan"]["fits"], fit["plan"]["code"]) == (MIB, False, "")


def test_a_plan_is_not_enough_for_a_larger_step_that_was_not_traced(tmp_path: Path) -> None:
    peak = trace().result.peak or 0
    whole_run(tmp_path, batch(8, 5 * peak))
    result = memlog("advise", "latest", "--fit", "1 GiB")
    assert result.exit_code == 1
    assert "The plan is for step 7 alone: at step 8 more was held." in result.stdout


def test_a_plan_is_not_enough_for_a_step_that_ran_out_of_memory(tmp_path: Path) -> None:
    traced_run(tmp_path)
    result = memlog("advise", "latest", "--fit", "1 GiB")
    assert result.exit_code == 1
    assert "The plan is for step 7 alone: after step 7 an allocation failed" in result.stdout


def test_a_step_that_did_not_end_has_no_plan(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    event = trace_event(trace().result, None)
    run.worst_step.write_bytes(msgspec.msgpack.encode((event, trace())))
    result = memlog("advise", "latest", "--fit", "1 GiB")
    assert result.exit_code == 1
    assert "There is no plan, because the traced step did not end" in result.stdout
    assert "yes" not in result.stdout


def test_without_readings_of_the_step_the_plan_says_what_is_not_counted(tmp_path: Path) -> None:
    event = trace_event(trace().result, 7)
    directory = MadeRun(tmp_path).write(event).closed()
    directory.worst_step.write_bytes(msgspec.msgpack.encode((event, trace())))
    result = memlog("advise", "latest", "--fit", "1 GiB")
    assert "Not counted: the process's memory beside tensors." in result.stdout
    assert result.exit_code == 0
