"""Every surface tells the truth about short trainings that keep memory, and that end in many ways.

`make truth` does the same for more programs, and runs the same program again and again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.planted_programs import ENDS, HOLDERS, death, outcome_of, planted_program
from support.surfaces import Said, against, among_themselves

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("without_mlflows_environment")]

SEEDS = (1, 6, 9, 10, 11, 12, 14, 18)


def test_48_seeds_have_all_pairs_of_holder_and_end() -> None:
    pairs = {(each.holder, each.ends) for each in map(planted_program, range(48))}
    assert len(pairs) == len(HOLDERS) * len(ENDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_surface_tells_the_truth(tmp_path: Path, seed: int) -> None:
    assert outcome_of(planted_program(seed), tmp_path).contradictions == []


@pytest.mark.parametrize("seed", [1])
def test_the_first_line_about_a_death_names_the_cause(tmp_path: Path, seed: int) -> None:
    outcome = outcome_of(death(seed), tmp_path)
    assert outcome.contradictions == []
    assert outcome.names_the_cause


@pytest.mark.parametrize(
    ("verdict", "wrong"),
    [
        (
            "Ended unexpectedly. No growth: peak 1.0 GiB, steady since step 3",
            "an all-clear, but memory rose (host)",
        ),
        (
            "Ended unexpectedly after step 9. other, a list in train.py:3, gains one tensor per step. "
            "Memory grows by 2.0 MiB a step since step 0.",
            "a wrong cause, in truth kept",
        ),
        ("Out of memory on the host. Unsure: memory rose by 1 GiB", "it does not begin with"),
    ],
)
def test_a_wrong_first_line_is_reported(verdict: str, wrong: str) -> None:
    [line] = against(death(1).truth(), [Said("show", "verdict", verdict)])
    assert line.startswith(f"show: {wrong}")


def test_two_surfaces_that_differ_are_reported() -> None:
    said = [Said("show", "steps", 95), Said("runs", "steps", 95), Said("compare", "steps", 91)]
    assert [*among_themselves(said)] == ["steps: show, runs: 95; compare: 91"]
