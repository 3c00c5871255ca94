"""Made-up memory at step ends, in MiB, of healthy and of growing programs, with autocorrelated noise.

A seed chooses each series' level, noise, periods and rate, so a family stands for many programs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

Family: TypeAlias = Callable[[random.Random, int], list[float]]
"""Function that returns a series of memory levels, as many as its second argument says."""


def _noise(rng: random.Random, steps: int) -> Iterator[float]:
    """Yield an AR(1) process, with a correlation between 0 and 0.95."""
    near, spread = rng.choice((0.0, 0.5, 0.8, 0.95)), rng.uniform(0.05, 3.0)
    value = rng.gauss(0, spread)
    for _ in range(steps):
        yield value
        value = near * value + math.sqrt(1 - near * near) * rng.gauss(0, spread)


def _family(make: Callable[[random.Random], Callable[[int], float]]) -> Family:
    """Return a family: a base level, a warm-up, the pattern that ``make`` chooses, and noise."""

    def series(rng: random.Random, steps: int) -> list[float]:
        base, first, lasts = rng.uniform(150, 900), rng.uniform(0, 300), rng.uniform(0.3, 3)
        level = make(rng)
        return [
            base + first * (1 - math.exp(-n / lasts)) + level(n) + noise
            for n, noise in enumerate(_noise(rng, steps))
        ]

    return series


def _steady(_: random.Random) -> Callable[[int], float]:
    return lambda _n: 0.0


def _slow_warm_up(rng: random.Random) -> Callable[[int], float]:
    size, lasts = rng.uniform(20, 200), rng.uniform(4, 40)
    return lambda n: size * (1 - math.exp(-n / lasts))


def _sawtooth(rng: random.Random) -> Callable[[int], float]:
    period, each = rng.randint(4, 90), rng.uniform(0.2, 8)
    return lambda n: each * (n % period)


def _garbage(rng: random.Random) -> Callable[[int], float]:
    """Cycles that are freed after a number of steps that varies."""
    each, period = rng.uniform(0.5, 10), rng.randint(5, 60)
    state = [0.0, float(period)]

    def level(_: int) -> float:
        state[0] += each
        state[1] -= 1
        if state[1] <= 0:
            state[0], state[1] = rng.uniform(0, 2), float(rng.randint(period // 2, period + 5))
        return state[0]

    return level


def _jumps(rng: random.Random) -> Callable[[int], float]:
    when = [(rng.randint(5, 250), rng.uniform(5, 300)) for _ in range(rng.randint(1, 2))]
    return lambda n: sum(size for at, size in when if n >= at)


def _cache_that_fills(rng: random.Random) -> Callable[[int], float]:
    """A cache that fills while a dataset is read the first time. The run is at least three times as long."""
    full, each = rng.randint(10, 90), rng.uniform(0.3, 8)
    return lambda n: each * min(n, full)


def _ring_buffer(rng: random.Random) -> Callable[[int], float]:
    full, each, varies = rng.randint(5, 60), rng.uniform(0.5, 10), rng.uniform(0, 0.4)
    held: list[float] = []

    def level(_: int) -> float:
        held.append(each * rng.uniform(1 - varies, 1 + varies))
        del held[:-full]
        return sum(held)

    return level


def _lengths(rng: random.Random) -> Callable[[int], float]:
    widest = rng.uniform(5, 250)
    return lambda _n: rng.uniform(0, widest)


def _highest_so_far(rng: random.Random) -> Callable[[int], float]:
    """An arena that keeps the memory of the largest input so far."""
    middle, spread, state = rng.uniform(10, 100), rng.uniform(1, 25), [0.0]

    def level(_: int) -> float:
        state[0] = max(state[0], rng.gauss(middle, spread))
        return state[0]

    return level


def _longer_steps(rng: random.Random) -> Callable[[int], float]:
    period, size = rng.uniform(12, 150), rng.uniform(5, 80)
    return lambda n: size * (1 - math.cos(2 * math.pi * n / period))


def _events(rng: random.Random) -> Callable[[int], float]:
    every, size = rng.randint(8, 60), rng.uniform(10, 300)
    return lambda n: size if n % every >= every - rng.randint(1, 3) else 0.0


HEALTHY_FAMILIES: dict[str, Family] = {
    "steady": _family(_steady),
    "slow warm-up": _family(_slow_warm_up),
    "sawtooth": _family(_sawtooth),
    "garbage cycles": _family(_garbage),
    "one or two jumps": _family(_jumps),
    "dataset cache that fills": _family(_cache_that_fills),
    "ring buffer": _family(_ring_buffer),
    "inputs of many lengths": _family(_lengths),
    "high-water mark of an arena": _family(_highest_so_far),
    "longer steps that come and go": _family(_longer_steps),
    "evaluations and checkpoints": _family(_events),
}


def _rate(rng: random.Random) -> float:
    """Rate of a leak, in MiB per step: in 100 steps, memory grows by over 5 % of the highest level."""
    return rng.choice((0.6, 1.0, 1.0, 2.0, 5.0, 20.0))


def _leak(rng: random.Random) -> Callable[[int], float]:
    rate = _rate(rng)
    return lambda n: rate * n


def _later(rng: random.Random) -> Callable[[int], float]:
    rate, begins = _rate(rng), rng.randint(20, 120)
    return lambda n: rate * max(0, n - begins)


def _on_swings(rng: random.Random) -> Callable[[int], float]:
    rate, period = _rate(rng), rng.randint(3, 12)
    each = rng.uniform(0.2, 1) * rate
    return lambda n: rate * n + each * (n % period)


def _stairs(rng: random.Random) -> Callable[[int], float]:
    rate, every = _rate(rng), rng.randint(2, 20)
    return lambda n: rate * every * (n // every)


def _uneven(rng: random.Random) -> Callable[[int], float]:
    rate, state = _rate(rng), [0.0]

    def level(_: int) -> float:
        state[0] += rate * rng.uniform(0, 2)
        return state[0]

    return level


def _after_a_jump(rng: random.Random) -> Callable[[int], float]:
    rate, at, size = _rate(rng), rng.randint(5, 60), rng.uniform(50, 500)
    return lambda n: rate * n + size * (n >= at)


def _with_events(rng: random.Random) -> Callable[[int], float]:
    rate, event = _rate(rng), _events(rng)
    return lambda n: rate * n + event(n)


def _faster_and_faster(rng: random.Random) -> Callable[[int], float]:
    rate = _rate(rng)
    return lambda n: rate * n * (1 + n / 300)


GROWING_FAMILIES: dict[str, Family] = {
    "leak": _family(_leak),
    "leak that begins later": _family(_later),
    "leak below swings": _family(_on_swings),
    "leak in stairs": _family(_stairs),
    "leak of uneven pieces": _family(_uneven),
    "leak and a jump": _family(_after_a_jump),
    "leak beside evaluations": _family(_with_events),
    "leak that becomes faster": _family(_faster_and_faster),
}


def levels(family: Family, seed: int, steps: int) -> list[float]:
    return family(random.Random(seed), steps)  # noqa: S311 - the same at every run
