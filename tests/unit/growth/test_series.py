"""One series: growth is found, confirmed and dated, and healthy programs raise none."""

import random
import zlib

import pytest
from support.growth_series import GROWING_FAMILIES, HEALTHY_FAMILIES, Family, levels

from memlog._internal.terminal import MIB
from memlog.growth import MAX_LEVELS
from memlog.growth.series import News, SeriesWatch

FREE = 20_000.0
"""Free memory at the beginning, in MiB."""
EACH = 25
"""Number of programs tested of each family."""


def news(sizes: list[float], *, ended: bool = True) -> list[tuple[int, News]]:
    """Return the reports on these levels in MiB, each with its step."""
    watch = SeriesWatch(4 * MIB)
    watch.free = FREE * MIB
    found = [(step, watch.take(step, size * MIB)) for step, size in enumerate(sizes)]
    if ended:
        found.append((len(sizes), watch.end()))
    return [(step, one) for step, one in found if one is not None]


def steps(found: list[tuple[int, News]], verdict: str) -> list[int]:
    return [step for step, one in found if one.verdict == verdict]


def programs(families: dict[str, Family], length: int) -> list[tuple[str, list[float]]]:
    return [
        (name, levels(family, zlib.crc32(name.encode()) + seed, length))
        for name, family in families.items()
        for seed in range(EACH)
    ]


@pytest.mark.parametrize("length", [300, 700])
@pytest.mark.slow
def test_healthy_programs_raise_no_alarm(length: int) -> None:
    made = programs(HEALTHY_FAMILIES, length)
    alarms = [name for name, sizes in made if steps(news(sizes), "confirmed")]
    assert len(made) >= 200
    assert len(HEALTHY_FAMILIES) >= 10
    assert alarms == []


def test_suspicions_of_healthy_programs_are_withdrawn() -> None:
    for _, sizes in programs(HEALTHY_FAMILIES, 300):
        found = [one.verdict for _, one in news(sizes)]
        assert found == ["suspected", "withdrawn"] * (len(found) // 2)


def test_growing_programs_are_found_once() -> None:
    made = programs(GROWING_FAMILIES, 300)
    found = [steps(news(sizes), "confirmed") for _, sizes in made]
    assert len(made) >= 200
    assert len(GROWING_FAMILIES) >= 8
    assert sum(len(confirmed) == 1 for confirmed in found) >= 0.98 * len(made)


def test_growth_is_suspected_within_a_few_dozen_steps() -> None:
    made = [
        sizes for name, sizes in programs(GROWING_FAMILIES, 120) if name == "leak of uneven pieces"
    ]
    first = sorted(steps(news(sizes), "suspected")[0] for sizes in made)
    assert first[len(first) // 2] <= 68
    assert first[-1] < 100


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_a_slow_leak_below_noise_is_found(rate: float) -> None:
    """1 MiB per step, and 5 % of 500 MiB in 100 steps."""
    noise = random.Random(3)  # noqa: S311 - the same at every run
    sizes = [500 + rate * step + noise.gauss(0, 1) for step in range(400)]
    [(_, confirmed)] = [(n, one) for n, one in news(sizes) if one.verdict == "confirmed"]
    assert confirmed.growth.low <= rate * MIB * 1.02
    assert confirmed.growth.high >= rate * MIB * 0.98
    assert confirmed.growth.rate == pytest.approx(rate * MIB, rel=0.05)
    assert steps(news(sizes), "suspected")[0] <= 90


@pytest.mark.parametrize("filled", [24, 32])
def test_a_cache_that_is_full_after_a_few_dozen_steps_is_not_suspected(filled: int) -> None:
    """A search for what holds the memory would cost about a second."""
    assert news([300 + 1.5 * min(step, filled) for step in range(300)]) == []


def test_growth_that_fills_memory_soon_is_suspected_at_once() -> None:
    found = news([300 + 150.0 * step for step in range(60)])
    assert steps(found, "suspected")[0] <= 45


def test_growth_after_a_jump_is_dated_and_measured_from_there() -> None:
    sizes = [400.0] * 50 + [900.0 + 2 * step for step in range(300)]
    [(_, confirmed)] = [(n, one) for n, one in news(sizes) if one.verdict == "confirmed"]
    assert 45 <= confirmed.growth.since <= 60
    assert confirmed.growth.rate == pytest.approx(2 * MIB, rel=0.03)


def test_growth_too_slow_to_matter_is_none() -> None:
    """10 KiB per step of 500 MiB: the limit is two million steps away."""
    assert news([500 + 0.01 * step for step in range(3000)]) == []


def test_a_slow_growth_near_the_limit_matters() -> None:
    watch = SeriesWatch(4 * MIB)
    watch.free = 500.0 * MIB
    found = [watch.take(step, (60_000 + 0.05 * step) * MIB) for step in range(1000)]
    assert [one.verdict for one in found if one] == ["suspected", "confirmed"]


def test_the_same_growth_is_reported_again_only_if_it_becomes_much_faster() -> None:
    slow = [500 + 2.0 * step for step in range(600)]
    faster = [slow[-1] + 3.0 * step for step in range(600)]
    much_faster = [faster[-1] + 8.0 * step for step in range(600)]
    found = news(slow + faster + much_faster)
    confirmed = [round(one.growth.rate / MIB) for _, one in found if one.verdict == "confirmed"]
    assert confirmed == [2, 8]


def test_growth_is_confirmed_before_memory_is_full() -> None:
    watch = SeriesWatch(4 * MIB)
    watch.free = 20_000.0 * MIB
    confirmed = [
        step for step in range(60) if (one := watch.take(step, 400 * MIB * step)) and step and one
    ]
    assert confirmed[-1] <= 50


def test_steps_counted_anew_begin_another_series() -> None:
    watch = SeriesWatch(4 * MIB)
    assert [watch.take(n % 20, (500 + 20 * n) * MIB) for n in range(200)] == [None] * 200


def test_memory_of_a_long_run_is_bounded() -> None:
    watch = SeriesWatch(4 * MIB)
    for step in range(20_000):
        watch.take(step, 500.0 * MIB)
    assert [len(window.levels) for window in watch._levels.windows] == [MAX_LEVELS] * 3


def test_a_warm_up_is_no_short_growth() -> None:
    def short(sizes: list[float]) -> bool:
        watch = SeriesWatch(8 * MIB, 10)
        for number, size in enumerate(sizes):
            watch.take(10 * number, size * MIB)
        return watch.short_growth() is not None

    assert short([200, 210, 220, 230])
    assert not short([200, 230, 234, 235])
    assert not short([200, 210, 220])
    assert not short([200, 200, 220, 230])


def refilled(rate: float) -> tuple[list[float], list[float]]:
    """Return levels that stay for 40 steps, as freed memory is refilled, and those in use, in MiB.

    Args:
        rate: Growth of memory in use per step from step 70 on; 0.5 until then.
    """
    noise = random.Random(3)  # noqa: S311 - the same at every run
    in_use = [200 + 0.5 * min(step, 70) + rate * max(step - 70, 0) for step in range(140)]
    unused = [10.0 if step < 70 else max(30 - 0.5 * (step - 70), 10) for step in range(140)]
    together = zip(in_use, unused, strict=True)
    return [used + free + noise.uniform(-3, 3) for used, free in together], in_use


def watched_to_the_end(sizes: list[float], in_use: list[float]) -> tuple[SeriesWatch, News | None]:
    watch = SeriesWatch(4 * MIB)
    for step, (size, used) in enumerate(zip(sizes, in_use, strict=True)):
        watch.take(step, size * MIB)
        if step > 70 and watch.pending is not None:
            watch.in_use.append((step, int(used * MIB)))
    return watch, watch.end()


def test_growth_within_unused_memory_is_confirmed_by_the_bytes_in_use() -> None:
    sizes, in_use = refilled(0.5)
    assert "confirmed" not in [one.verdict for _, one in news(sizes)]
    _, last = watched_to_the_end(sizes, in_use)
    assert last is not None
    assert last.verdict == "confirmed"
    assert last.growth.rate == pytest.approx(0.5 * MIB, rel=0.01)
    assert last.growth.since < 10
    assert last.growth.level == sizes[-1] * MIB


def test_growth_that_ends_in_the_bytes_in_use_is_withdrawn() -> None:
    _, last = watched_to_the_end(*refilled(0.0))
    assert last is not None
    assert last.verdict == "withdrawn"


def test_memory_that_each_epoch_uses_again_is_withdrawn() -> None:
    """A list is cleared at the end of each epoch of 150 steps. The next epoch fills the freed memory."""
    watch = SeriesWatch(4 * MIB)
    watch.free = FREE * MIB
    found = []
    for step in range(300):
        found.append(watch.take(step, (200 + 0.2 * min(step, 150)) * MIB))
        if watch.pending is not None and step % 2 == 0:
            larger = 8 * (step >= 150)
            watch.in_use.append((step, int((100 + 0.2 * (step % 150) + larger) * MIB)))
    found.append(watch.end())
    assert [one.verdict for one in found if one] == ["suspected", "withdrawn"]
