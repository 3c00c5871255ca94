"""Some lasting rises, many steps apart, are a sign; a warm-up, a jump and noise are not."""

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from support.journals import MIB

from memlog.facts.rises import RepeatedRise, Rise


def rises(levels: Iterable[float]) -> list[Rise]:
    watch = RepeatedRise(4 * MIB)
    found = [watch.take(step, int(level * MIB)) for step, level in enumerate(levels)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("every", [16, 30, 100, 200, 500])
def test_the_second_rise_is_a_sign(every: int) -> None:
    rng = random.Random(every)  # noqa: S311 - the same at every run
    levels = (500 + 20 * (step // every) + rng.gauss(0, 0.3) for step in range(2 * every + 20))
    [found] = rises(levels)
    assert found.since == pytest.approx(every, abs=5)
    assert found.step == pytest.approx(2 * every, abs=5)
    assert found.rate * (found.step - found.since) == pytest.approx(20 * MIB, rel=0.1)


def test_a_rise_that_comes_in_two_steps_is_one() -> None:
    levels = (500 + 10 * ((step + 1) // 50) + 10 * (step // 50) for step in range(120))
    [found] = rises(levels)
    assert found.rate * (found.step - found.since) == pytest.approx(20 * MIB, rel=0.1)


def test_three_rises_of_any_size_are_a_sign() -> None:
    sizes = [60, 20, 40]
    [found] = rises(500 + sum(sizes[: step // 100]) for step in range(399))
    assert (found.since, found.step) == (102, 302)
    assert found.rate * (found.step - found.since) == pytest.approx(20 * MIB)


def test_the_part_of_a_rise_that_lasts_counts() -> None:
    levels = [500.0] * 20 + [646.0] * 40 + [607.0] * 40 + [672.0] * 40 + [711.0] * 40
    assert len(rises(levels)) == 1
    assert rises([500.0] * 20 + [646.0] * 40 + [500.0] * 40 + [565.0] * 40 + [604.0] * 40) == []


def test_there_is_no_second_sign_while_a_search_may_go_on() -> None:
    found = rises(500 + 20 * (step // 50) for step in range(4_000))
    assert len(found) == 3
    assert all(after.step - before.step >= 1_450 for before, after in pairwise(found))


@pytest.mark.parametrize(
    "level",
    [
        lambda step: 500 + 20 * min(step, 4),  # a warm-up
        lambda step: 500 + 60 * (step > 100),  # a jump
        lambda step: 500 + 60 * (step > 100) + 20 * (step > 200),  # two sizes
        lambda step: 500 + 30 * (step % 50 == 0),  # peaks
        lambda step: 500 + 30 * (step // 50 % 2),  # up and down
        lambda step: 500 + 3 * (step % 5),
    ],
)
def test_other_levels_are_no_sign(level) -> None:
    assert rises(level(step) for step in range(600)) == []
