"""The evidence that memory does not grow: never on a rising curve, nearly always on a healthy one."""

import random

import pytest
from support.growth_series import GROWING_FAMILIES, HEALTHY_FAMILIES, levels

from memlog._internal.terminal import MIB
from memlog.growth.evidence import Evidence, evidence

FLOOR = 4 * MIB
LENGTHS = (30, 60, 120, 400)
CALM = (
    "steady",
    "slow warm-up",
    "one or two jumps",
    "dataset cache that fills",
    "ring buffer",
    "inputs of many lengths",
    "evaluations and checkpoints",
)
"""Healthy programs whose memory does not swing by a multiple of its level for a hundred steps."""


def known(series: list[float]) -> Evidence:
    return evidence(range(len(series)), [level * MIB for level in series], FLOOR)


def leak(rate: float, steps: int, seed: int, begins: int = 0) -> list[float]:
    """Return levels in MiB: a warm-up, noise of 0.3 MiB, and a leak of ``rate`` MiB a step."""
    rng = random.Random(seed)  # noqa: S311 - the same at every run
    return [
        300 + 40 * min(step, 3) + rate * max(0, step - begins) + rng.gauss(0, 0.3)
        for step in range(steps)
    ]


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("kib", [1, 8, 64, 128, 512, 2048, 8192])
def test_an_all_clear_excludes_no_rise_that_is_there(kib: int, steps: int) -> None:
    for seed in range(10):
        found = known(leak(kib / 1024, steps, seed))
        if found.since is not None:
            assert (steps - 1 - found.since) * kib * 1024 <= found.excluded
            assert kib * 1024 * steps <= 2 * FLOOR


@pytest.mark.parametrize("begins", [150, 180, 190])
def test_a_leak_that_begins_late_is_no_all_clear(begins: int) -> None:
    for seed in range(10):
        assert known(leak(2.0, 200, seed, begins)).since is None


@pytest.mark.parametrize("family", GROWING_FAMILIES)
def test_no_all_clear_on_a_rising_curve(family: str) -> None:
    if family == "leak that begins later":
        return  # the next test has it, with the step at which it begins
    for seed in range(60):
        steps = random.Random(seed).choice((60, 120, 400))  # noqa: S311 - as above
        series = levels(GROWING_FAMILIES[family], seed, steps)
        found = known(series)
        if found.since is not None:
            assert found.excluded > 0.8 * (series[-1] - series[found.since]) * MIB


@pytest.mark.parametrize("every", [20, 50, 100])
@pytest.mark.parametrize("steps", [310, 405, 490])
def test_memory_kept_at_each_evaluation_is_no_all_clear(every: int, steps: int) -> None:
    assert known([500.0 + 30 * (step // every) for step in range(steps)]).since is None


@pytest.mark.parametrize("family", CALM)
def test_a_healthy_run_gets_an_all_clear(family: str) -> None:
    unsure = [
        seed
        for seed in range(100)
        if known(levels(HEALTHY_FAMILIES[family], seed, 400)).since is None
    ]
    assert len(unsure) <= (10 if family == "one or two jumps" else 5)


def test_the_evidence_is_named() -> None:
    found = known([300.0] * 20 + [340.0] * 80)
    assert found == Evidence(20, 80, 0.0, FLOOR, 0.0)


def test_a_rise_is_named() -> None:
    found = known([300.0 + step for step in range(100)])
    assert found.since is None
    assert found.rise == pytest.approx(98 * MIB)


def test_levels_that_dip_now_and_then_are_steady() -> None:
    """In the last steps, there is no dip. The lowest of the levels that are left rises there."""
    series = [500.0 + 20 * (step >= 60) + 10 * (step >= 132) for step in range(400)]
    for step in range(135, 375, 9):
        series[step] -= 5.5
    found = known(series)
    assert found.since == 132
    assert found.excluded < 2 * FLOOR
