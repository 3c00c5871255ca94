"""Memory at the end of each step, in MiB, of scripts that leak and of scripts that don't.

Each series is a pattern of real training code. A seed makes each series the same in every test run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TypeAlias

Series: TypeAlias = Callable[[int, random.Random], list[float]]
"""Function that makes the values of a number of steps."""

BASE = 400.0


def _warm(n: int) -> float:
    """Warm-up in the first steps of any script: model, optimizer state, arenas and lazy imports."""
    return BASE + (0, 180, 212, 226, 231, 232)[min(n, 5)]


def _noisy(value: float, rng: random.Random) -> float:
    return value + abs(rng.gauss(0, 0.3))


def _of(level: Callable[[int, random.Random], float]) -> Series:
    return lambda steps, rng: [_noisy(_warm(n) + level(n, rng), rng) for n in range(steps)]


def _allocator_noise(steps: int, rng: random.Random) -> list[float]:
    """Noise of the heap: fragments that come and go after a few steps."""
    level, values = 0.0, []
    for n in range(steps):
        level = 0.9 * level + rng.gauss(0, 4)
        values.append(_warm(n) + 20 + level)
    return values


def _slow_warm_up(steps: int, rng: random.Random) -> list[float]:
    """Warm-up by a cache with a kernel for each shape. New shapes become rare."""
    return [_noisy(_warm(n) + 60 * (1 - math.exp(-n / 12)), rng) for n in range(steps)]


HEALTHY: dict[str, Series] = {
    "flat": _of(lambda *_: 0),
    "no warm-up": lambda steps, rng: [_noisy(BASE, rng) for _ in range(steps)],
    "slow warm-up": _slow_warm_up,
    "sawtooth of 10": _of(lambda n, _: 12.0 * (n % 10)),
    "sawtooth of 25": _of(lambda n, _: 6.0 * (n % 25)),
    "sawtooth that falls at random": _of(lambda n, rng: 8.0 * (n % 17) + rng.uniform(0, 20)),
    "one-time jump": _of(lambda n, _: 300.0 if n >= 37 else 0),
    "two jumps": _of(lambda n, _: 120.0 * (n >= 20) + 200.0 * (n >= 45)),
    "dataset cache that fills once": _of(lambda n, _: 3.0 * min(n, 48)),
    "dataset cache that fills slowly": _of(lambda n, _: 1.5 * min(n, 80)),
    "ring buffer": _of(lambda n, _: 5.0 * min(n, 20)),
    "replay buffer that was made at once": _of(lambda n, _: 800.0 if n >= 2 else 0),
    "garbage cycles": _of(lambda n, _: 9.0 * ((n * 7) % 11)),
    "variable-length inputs": _of(lambda _, rng: rng.uniform(0, 250)),
    "lengths of a few kinds": _of(lambda _, rng: rng.choice((10.0, 40.0, 160.0, 320.0))),
    "sorted by length, again each epoch": _of(lambda n, _: 4.0 * (n % 24)),
    "evaluation every 20": _of(lambda n, _: 90.0 * (n >= 20) + 250.0 * (n % 20 == 19)),
    "checkpoint every 25": _of(lambda n, _: 230.0 * (n % 25 == 24)),
    "grows, then shrinks": _of(lambda n, _: 10.0 * max(0, 30 - abs(n - 30))),
    "shrinks": _of(lambda n, _: max(0.0, 300 - 3.0 * n)),
    "allocator noise": _allocator_noise,
    "slow wave": _of(lambda n, _: 20 * math.sin(n / 9)),
    "a spike now and then": _of(lambda _, rng: 600.0 if rng.random() < 0.04 else 0),
    "prefetch that comes and goes": _of(lambda _, rng: 30.0 * rng.randint(0, 8)),
}
"""Scripts without a leak."""

LEAKS: dict[str, Series] = {
    "kept losses": _of(lambda n, _: 20.0 * n),
    "kept losses, after a warm-up of 30 steps": _of(lambda n, _: 20.0 * max(0, n - 30)),
    "kept hooks, noisy": _of(lambda n, rng: 20.0 * n + rng.uniform(0, 30)),
    "cache without a bound, of lengths that vary": _of(
        lambda n, rng: 20.0 * n + rng.uniform(0, 80)
    ),
    "sawtooth on a slope": _of(lambda n, _: 20.0 * n + 9 * (n % 7)),
    "two a step, then one": _of(lambda n, _: 40.0 * min(n, 30) + 20.0 * max(0, n - 30)),
    "faster and faster": _of(lambda n, _: 20.0 * n + 0.2 * n * n),
    "with evaluations": _of(lambda n, _: 20.0 * n + 150.0 * (n % 20 == 19)),
    "a jump first": _of(lambda n, _: 700.0 * (n >= 10) + 20.0 * n),
    "C library": lambda steps, _: [BASE + 20.0 * n for n in range(steps)],
    "allocator noise": lambda steps, rng: [
        value + 20.0 * n for n, value in enumerate(_allocator_noise(steps, rng))
    ],
    "spikes": _of(lambda n, rng: 20.0 * n + (300.0 if rng.random() < 0.05 else 0)),
}
"""Scripts that keep 20 MiB of each step."""


def made(series: Series, steps: int, seed: int = 0) -> list[float]:
    return series(steps, random.Random(seed))  # noqa: S311 - the same at every run
