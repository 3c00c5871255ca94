"""The interval that `find_growth` gives for a rate."""

import random

from memlog.growth import find_growth


def test_the_interval_covers_the_rate_although_neighbours_resemble_each_other() -> None:
    """95 % coverage is promised for independent blocks. An AR(1) process of 0.9 is harder."""
    covered = 0
    for seed in range(200):
        rng = random.Random(seed)  # noqa: S311 - the same at every run
        value, sizes = 0.0, []
        for step in range(128):
            value = 0.9 * value + rng.gauss(0, 0.5)
            sizes.append(500 + 0.5 * step + value)
        growth = find_growth(range(128), sizes, 0.1, 24)
        covered += growth is not None and growth.low <= 0.5 <= growth.high
    assert covered >= 0.85 * 200
