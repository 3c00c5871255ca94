"""Everything that shows a run says the same about it, and says what is true.

`make truth` does the same for 950 journals and 50 real runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from msgspec.structs import replace
from support import surfaces
from support.journals import GIB, MadeRun, at, batch
from support.planted_memory import PATTERNS
from support.planted_runs import ENDINGS, planted_run
from support.surfaces import contradictions

from memlog.events import End
from memlog.reports import summarize
from memlog.reports.page import html

SEEDS = range(0, len(ENDINGS) * len(PATTERNS), 3)
"""With these seeds, each pattern of memory and each ending occurs several times."""


@pytest.mark.parametrize("seed", SEEDS)
def test_every_surface_tells_the_planted_truth(tmp_path: Path, seed: int) -> None:
    run, truth = planted_run(tmp_path, seed)
    assert contradictions(run, truth) == []


def test_a_seed_makes_the_same_run_each_time(tmp_path: Path) -> None:
    runs = [planted_run(tmp_path / name, 7) for name in ("one", "two")]
    assert runs[0][1] == runs[1][1]
    first, second = ([*run.events("trainer")] for run, _ in runs)
    assert first == second


def test_an_all_clear_is_the_rule_for_healthy_runs(tmp_path: Path) -> None:
    made = [planted_run(tmp_path, seed, ending="finished") for seed in range(100)]
    outcomes = [
        summarize(run).outcome for run, truth in made if truth.is_healthy and truth.steps >= 25
    ]
    assert len(outcomes) > 20
    assert outcomes.count("steady") >= 0.8 * len(outcomes)


def test_the_users_name_of_the_trackers_run_is_shown(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).bound("mlflow", "3f2a9c", None, name="brave-cat-7")
    run = made.write(batch(0, GIB), End(at(2), "finished")).closed()
    shown = surfaces.output("show", run, run.id)
    assert shown.splitlines()[2] == "run k7m2xq9a  finished  brave-cat-7"
    header = html(run).partition("<main")[0].partition("<header")[2]
    assert "brave-cat-7" in header


_FIGURES = "memlog.cli.compare.run_figures"
_PAGE = "memlog.reports.page.facts.summary_of"
_DESCRIPTION = "memlog.reports.description.summarize"
_POSTMORTEM = "memlog.delivery.helper.postmortem"


def _other_steps(found: Any) -> Any:
    return replace(found, steps=found.steps + 1)


def _all_clear(found: Any) -> Any:
    return replace(
        found, verdict="No growth: peak 1.0 GiB, steady since step 3 (9 steps: a rise …)."
    )


def _other_peak(found: Any) -> Any:
    peaks = {
        kind: replace(peak, bytes=(peak.bytes or 0) + GIB) for kind, peak in found.peaks.items()
    }
    return replace(found, peaks=peaks)


def _other_status(found: Any) -> Any:
    return replace(found, status="failed")


def _other_figure(found: Any) -> Any:
    return replace(found, figures={**found.figures, "host.rss": 1.0})


def _other_worst(found: Any) -> Any:
    return found._replace(event=replace(found.event, step=3))


def _other_report(found: Any) -> Any:
    return replace(found, text="# Ended unexpectedly\n\nNothing points to memory.\n")


def _without_growth(found: Any) -> Any:
    return replace(found, text=found.text.replace("Memory grows", "Memory stays"))


MUTANTS: dict[str, tuple[str, Callable[[Any], Any], str, str]] = {
    "show": ("memlog.cli.show.summarize", _other_steps, "show", "steps is"),
    "a leak is cleared": ("memlog.cli.show.summarize", _all_clear, "show", "an all-clear, but"),
    "peaks of runs": (
        "memlog.cli.runs.summarize",
        _other_peak,
        "runs",
        "shown peak of host.rss is",
    ),
    "status of runs": ("memlog.cli.runs.summarize", _other_status, "runs", "status is failed"),
    "compare": (_FIGURES, _other_figure, "compare", "shown peak of host.rss is"),
    "a gate": (_FIGURES, _other_figure, "gate", "peak of host.rss is"),
    "report": (_PAGE, _other_peak, "report", "shown peak of host.rss is"),
    "advise": (
        "memlog.cli.advise.read_worst_step",
        _other_worst,
        "advise",
        "worst traced step is 3",
    ),
    "watch": ("memlog.reports.live.LiveRun.state", _all_clear, "watch --json", "an all-clear, but"),
    "description": (_DESCRIPTION, _all_clear, "description", "an all-clear, but"),
    "a tracker's page": (_DESCRIPTION, _other_steps, "tracker", "steps is"),
    "alert": (f"{_POSTMORTEM}.of_memory", _without_growth, "alert", "lacks the growth"),
    "post-mortem": (
        f"{_POSTMORTEM}.report",
        _other_report,
        "post-mortem",
        "nothing points to memory",
    ),
}


_KILLED_LEAK = 24
"""Seed of a run that has traced steps and a holder of its growth, and is killed."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_surface_that_says_otherwise_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    target, changed, surface, expected = MUTANTS[mutant]
    run, truth = planted_run(tmp_path, _KILLED_LEAK)
    assert truth.rising
    assert truth.worst is not None
    original = resolve_name(target)

    def mutated(*arguments: Any, **named: Any) -> Any:
        return changed(original(*arguments, **named))

    monkeypatch.setattr(target, mutated)
    told = [line.partition(": ") for line in contradictions(run, truth)]
    assert any(surface in who.split(", ") and expected in what for who, _, what in told), told
