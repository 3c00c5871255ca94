"""A rise that is even from the first steps on is seen after a dozen steps; noise and warm-ups are not."""

import random
from collections.abc import Iterable

import pytest
from support.journals import MIB

from memlog.facts.rises import EarlyRise, Rise


def first_rise(levels: Iterable[float]) -> Rise | None:
    watch = EarlyRise(4 * MIB)
    for step, level in enumerate(levels):
        found = watch.take(step, int(level * MIB))
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(("rate", "within"), [(8, 12), (2, 12), (0.5, 20), (0.1, 80), (0.03, 260)])
def test_a_leak_is_seen(rate: float, within: int) -> None:
    rng = random.Random(1)  # noqa: S311 - the same at every run
    found = first_rise(500 + rate * step + rng.gauss(0, 0.1) for step in range(400))
    assert found is not None
    assert found.step < within
    assert found.rate == pytest.approx(rate * MIB, rel=0.3)


def test_steady_memory_is_no_rise() -> None:
    for seed in range(20):
        rng = random.Random(seed)  # noqa: S311 - the same at every run
        assert first_rise(500 + rng.gauss(0, 0.5) for _ in range(2_000)) is None


def test_a_warm_up_and_a_jump_are_no_rise() -> None:
    assert first_rise(500 + 20 * min(step, 4) for step in range(400)) is None
    assert first_rise(500 + 60 * (step > 100) for step in range(400)) is None
    assert first_rise(500 + 3 * (step % 5) for step in range(400)) is None
