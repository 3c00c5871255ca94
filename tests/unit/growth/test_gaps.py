"""A series goes on after the steps in which memlog itself took memory."""

import random
from collections.abc import Iterable

from memlog._internal.terminal import MIB
from memlog.growth.series import Gaps, SeriesWatch, StepLevel

SEARCH = 24
"""Number of steps that a search takes."""


def joined(levels: Iterable[int], gap: range) -> list[StepLevel]:
    gaps = Gaps()
    return [
        one
        for step, level in enumerate(levels)
        for one in gaps.take(step, level, left_out=step in gap)
    ]


def test_growth_goes_on_after_a_gap_as_if_there_was_none() -> None:
    levels = joined([step + (1000 if step >= 60 else 0) for step in range(100)], range(50, 70))
    assert levels[-1].step < 80
    assert all(one.level == one.step for one in levels)


def test_a_series_goes_on_after_its_rest_was_taken_in_a_gap() -> None:
    gaps, taken = Gaps(), []
    for step in range(60):
        taken += gaps.take(step, step, left_out=step >= 50)
    taken += gaps.rest()
    for step in range(60, 100):
        taken += gaps.take(step, step, left_out=False)
    assert [(one.step, one.level) for one in taken] == [(step, step) for step in range(100)]
    assert list(gaps.rest()) == []


def test_a_spike_beside_a_gap_moves_no_other_level() -> None:
    sizes = [500] * 100
    sizes[49], sizes[70] = 900, 100
    levels = joined(sizes, range(50, 70))
    assert [one.level for one in levels if one.level != 500] == [900]


def confirmations(sizes: list[float], added: float) -> int:
    """Return how often growth of levels in MiB is confirmed, if a search follows each suspicion.

    Args:
        sizes: The levels without the search.
        added: MiB that each search leaves behind.
    """
    gaps, watch = Gaps(), SeriesWatch(4 * MIB)
    watch.free = 20_000.0 * MIB
    until, left, found = -1, 0.0, []
    for step, size in enumerate(sizes):
        left += added if step == until else 0
        for one in gaps.take(step, int((size + left) * MIB), left_out=step <= until):
            news = watch.take(*one)
            found.append(news)
            if news is not None and news.verdict == "suspected":
                until = step + SEARCH
    found += [watch.take(*one) for one in gaps.rest()]
    found.append(watch.end())
    return sum(one is not None and one.verdict == "confirmed" for one in found)


def program(seed: int, grows_until: int) -> list[float]:
    """Return 200 noisy levels that rise by 0.3 MiB a step and then stay."""
    chance = random.Random(seed)  # noqa: S311 - the same at every run
    noise, sizes = 0.0, []
    for step in range(200):
        noise = 0.3 * noise + chance.gauss(0, 4)
        sizes.append(230 + 0.32 * min(step, grows_until) + noise)
    return sizes


def test_growth_that_ends_after_the_search_is_not_confirmed() -> None:
    assert sum(confirmations(program(seed, 110), added=8) for seed in range(200)) == 0


def test_growth_that_lasts_is_confirmed_in_spite_of_the_search() -> None:
    found = [confirmations(program(seed, 200), added=8) for seed in range(100)]
    assert found.count(1) >= 95
