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

from memlog._internal.units import format_bytes
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.events import OutOfMemory
from memlog.journal import RunDirectory
from memlog.reports.final_state import final_state
from memlog.reports.oom_diagnosis import Witness
from memlog.reports.postmortem import report
from memlog.trace.predict import advise
from memlog.trace.records import RecordedTrace
from memlog.tracer.schedule.trace_event import trace_event

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
    assert set(document) == {"schema", "run", "step", "advice", "standing", "longest_batch"}
    assert (document["schema"], document["run"], document["step"]) == (1, run.id, 7)
    advice = document["advice"]
    named = "device engine traced_peak peak categories layers hints notes"
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
