"""Conditions of ``@pytest.mark.memory``, and the count of tensors that judges growth."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.journals import GIB, MIB, MadeRun, at, batch

from memlog.errors import ConfigurationError
from memlog.events import End, Finding, Run, Trace
from memlog.testing.limits import Limits, measure, parse_limits, update_entries
from memlog.testing.tensor_growth import TensorGrowth


def finished(root: Path, *events: Finding, peak: int = 100 * MIB, steps: int = 4) -> Path:
    """Make a run whose third step was traced."""
    run = MadeRun(root).write(Run(at(0), "test_it", None, (), {}))
    for step in range(steps):
        run.write(batch(step, GIB))
    trace = Trace(at(1), 2, "dispatch", True, peak, {"parameters": peak}, (), 0)
    return run.write(trace, *events, End(at(9), "finished")).closed().path


def failures(
    directory: Path, baseline: Path | None = None, name: str = "test_it", **conditions: str
) -> list[str]:
    return list(measure(directory, parse_limits(conditions), name, baseline).failures)


@pytest.mark.parametrize(
    ("conditions", "failed"),
    [
        ({"trace_peak": "< 101 MiB"}, False),
        ({"trace_peak": "< 100 MiB"}, True),
        ({"trace_peak": "<= 100 MiB"}, False),
        ({"trace_peak": "> 100 MiB"}, True),
        ({"host_rss": "< 1.5 GiB"}, False),
        ({"device_peak": "< 1 GiB"}, True),  # unknown
        ({"trace_peak": "< 1 GiB", "host_rss": "< 1 MiB"}, True),
    ],
)
def test_a_condition_says_what_must_hold(
    tmp_path: Path, conditions: dict[str, str], failed: bool
) -> None:
    assert bool(failures(finished(tmp_path), **conditions)) is failed


def test_a_failure_names_the_condition_and_the_largest_parts(tmp_path: Path) -> None:
    first, details, shows = failures(finished(tmp_path), trace_peak="< 100 MiB")
    assert first == "the gate 'trace.peak < 100 MiB' failed: run k7m2xq9a has 100.0 MiB"
    assert details == "at the traced peak: parameters 100.0 MiB"
    assert shows == f"`memlog show k7m2xq9a --dir {tmp_path}` shows the run"


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ("baseline +1 %", True),
        ("baseline + 3%", False),
        ("baseline", True),
        ("baseline +2 MiB", False),
    ],
)
def test_the_peak_is_compared_with_the_entry(tmp_path: Path, change: str, failed: bool) -> None:
    file = tmp_path / "memory.json"
    before = measure(finished(tmp_path / "a"), Limits(), "test_it", None)
    update_entries(file, {"test_it": before.entry})
    assert failures(finished(tmp_path / "same"), file, vs=change) == []
    found = failures(finished(tmp_path / "more", peak=102 * MIB), file, vs=change)
    assert bool(found) is failed
    if failed:
        assert found[0].endswith("run k7m2xq9a has 102.0 MiB against 100.0 MiB (+2.0 %)")


def test_an_entry_or_a_file_that_is_missing_is_no_pass(tmp_path: Path) -> None:
    file, run = tmp_path / "memory.json", finished(tmp_path)
    [line, *_] = failures(run, file, vs="baseline +1 %")
    assert "can't be judged: there is no baseline file" in line
    update_entries(file, {"other": measure(run, Limits(), "other", None).entry})
    [line, *_] = failures(run, file, vs="baseline +1 %")
    assert "memory.json has no training 'test_it', only 'other': add it with --update" in line


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        ({"trace_peek": "< 2 GiB"}, "did you mean trace.peak?"),
        ({"trace_peak": "2 GiB"}, "write >, >=, < or <="),
        ({"trace_peak": "< 2"}, "write the unit here"),
        ({"trace_peak": "< +5 %"}, "write a limit without + or -"),
        ({"trace_peak": 2}, "trace_peak=2: write text, as in memory("),
        ({"growth": "some"}, "growth='some': write growth=\"none\""),
        ({"vs": "main +1 %"}, "vs='main +1 %': write vs=\"baseline +1 %\""),
        ({"vs": "baseline 5 MiB"}, "vs='baseline 5 MiB': write + or -"),
    ],
)
def test_a_wrong_condition_says_how_to_write_it(conditions: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_limits(conditions)
    assert says in str(caught.value)


def test_growth_that_memlog_found_fails(tmp_path: Path) -> None:
    leak = Finding(at(2), 9, "container", "`kept` grows.", "`kept`", 0, float(MIB), None, None)
    [line, *_] = failures(finished(tmp_path, leak, steps=40), growth="none")
    assert line.startswith("memory grew: `kept` grows by 1.0 MiB a step")


def test_without_a_count_of_tensors_growth_needs_a_verdict(tmp_path: Path) -> None:
    [line, *_] = failures(finished(tmp_path), growth="none")
    assert line.startswith("growth can't be judged: Too few steps to judge growth (4)")


def counted(steps: int, step: Callable[[int], object]) -> TensorGrowth:
    growth = TensorGrowth()
    gc.collect()
    for number in range(steps):
        step(number)
        growth.after_step()
    return growth


@pytest.mark.parametrize("steps", [12, 40, 200])
def test_a_tensor_more_at_each_step_is_growth(steps: int) -> None:
    kept = []
    growth = counted(steps, lambda _: kept.append(torch.ones(1000)))
    assert str(growth.found()).startswith("tensors in use after a step grew by 3.9 KiB a step")


@pytest.mark.parametrize(
    ("steps", "every"),
    [(12, 3), (20, 5), (24, 6), (50, 10), (80, 5), (80, 8), (100, 20), (100, 25), (200, 25)],
)
def test_a_tensor_more_at_each_evaluation_is_growth(steps: int, every: int) -> None:
    kept = []
    growth = counted(steps, lambda at: at % every or kept.append(torch.ones(50_000)))
    assert str(growth.found()).startswith("tensors in use after a step grew by ")


@pytest.mark.parametrize("every", [1, 3])
def test_graphs_that_are_kept_are_growth(every: int) -> None:
    weight, kept = torch.ones(3, requires_grad=True), []
    growth = counted(60, lambda at: at % every or kept.append((weight * 2).sum()))
    assert str(growth.found()).startswith(
        "tensors that keep an autograd graph became more, from step"
    )


@pytest.mark.parametrize(
    "step",
    [
        lambda at, kept: kept.append(at),
        lambda at, kept: kept.append(torch.ones(1) * at),  # each step's loss
        lambda at, kept: at > 10 or kept.append(torch.ones(100_000)),  # a buffer that fills
        lambda at, kept: at % 10 or len(kept) > 3 or kept.append(torch.ones(100_000)),
        lambda at, kept: at not in (5, 30, 45) or kept.append(torch.ones(9000 * at)),
        lambda at, kept: kept.__setitem__(slice(None), [torch.ones(1000 * (at * 7 % 5))]),
    ],
    ids=["numbers", "losses", "buffer", "checkpoints", "stages", "varied"],
)
def test_a_healthy_loop_does_not_grow(step: Callable[[int, list[object]], object]) -> None:
    kept: list[object] = []
    assert counted(60, lambda at: step(at, kept)).found() is None


def test_too_few_steps_are_not_judged(tmp_path: Path) -> None:
    growth = counted(5, lambda _: None)
    found = measure(finished(tmp_path), parse_limits({"growth": "none"}), "", None, growth)
    assert found.failures[0] == "growth can't be judged: the test makes 5 steps, and 12 are needed"
