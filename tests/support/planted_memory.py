"""Made-up memory after each step, and the truth about it: whether it rises, and by how much."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

MIB = 1024**2

Shape: TypeAlias = Callable[[int], tuple[float, float]]
"""Function of the number of a step. It returns two sizes in bytes: memory that lasts, and memory that comes
and goes."""
Pattern: TypeAlias = Callable[[random.Random, int, float], Shape]
"""Function that chooses a shape for a number of steps and a number of bytes a step."""

_CLEAR_MIB = 16
"""If the lasting memory rises by less than this in a run, the run is too short to call it growth."""
_CLEAR_NOISE = 12
"""The same, as a multiple of the noise's standard deviation."""


class Course(NamedTuple):
    """Memory of one series. Sizes are bytes; the index is the number of the step, counted from 0."""

    pattern: str
    levels: list[int]
    lasting: list[float]
    """The same memory without noise, and without memory that comes and goes."""
    rises: bool | None
    """True if the memory rises until the end, False if it does not, ``None`` if the rise is too small to be
    told from noise, or has just ended."""
    rate: float
    """Bytes that each step keeps, on average; 0 if the memory does not rise until the end."""

    def rise(self, first: int, last: int) -> float:
        """Return the bytes by which the lasting memory rose from one step to another."""
        return self.lasting[last] - self.lasting[min(max(first, 0), last)]


def _leak(_: random.Random, __: int, rate: float) -> Shape:
    return lambda n: (rate * n, 0)


def _late_leak(rng: random.Random, steps: int, rate: float) -> Shape:
    begins = int(steps * rng.uniform(0.4, 0.75))
    return lambda n: (4 * rate * max(0, n - begins), 0)


def _stairs(rng: random.Random, steps: int, rate: float) -> Shape:
    """Memory that each evaluation keeps."""
    every = max(steps // rng.randint(6, 12), 2)
    return lambda n: (rate * every * (n // every), 0)


def _leak_and_garbage(rng: random.Random, _: int, rate: float) -> Shape:
    period, each = rng.randint(3, 12), rng.uniform(0.3, 1.5) * rate
    return lambda n: (rate * n, each * (n % period))


def _leak_after_a_fall(rng: random.Random, steps: int, rate: float) -> Shape:
    falls, size = max(steps // 4, 1), rng.uniform(20, 90) * MIB
    return lambda n: (rate * n - size * (n >= falls), 0)


def _faster_and_faster(_: random.Random, steps: int, rate: float) -> Shape:
    return lambda n: (rate * n * n / steps, 0)


def _leak_with_a_pause(_: random.Random, steps: int, rate: float) -> Shape:
    first, last = steps * 4 // 10, steps * 5 // 10
    return lambda n: (rate * (n if n < first else max(first, n - (last - first))), 0)


def _steady(_: random.Random, __: int, ___: float) -> Shape:
    return lambda _n: (0, 0)


def _warm_up(rng: random.Random, _: int, __: float) -> Shape:
    size, first = rng.uniform(20, 200) * MIB, rng.randint(2, 6)
    return lambda n: (size * min(n, first) / first, 0)


def _jump(rng: random.Random, steps: int, _: float) -> Shape:
    at, size = steps * rng.randint(1, 4) // 10, rng.uniform(10, 200) * MIB
    return lambda n: (size * (n >= at), 0)


def _garbage(rng: random.Random, _: int, rate: float) -> Shape:
    period = rng.randint(3, 9)
    return lambda n: (0, rate * (n % period))


def _fills(rng: random.Random, steps: int, rate: float) -> Shape:
    """A cache that is full after a part of the run."""
    full = max(int(steps * rng.uniform(0.1, 0.4)), 1)
    return lambda n: (rate * min(n, full), 0)


def _fall(rng: random.Random, steps: int, _: float) -> Shape:
    at, size = steps * rng.randint(3, 6) // 10, rng.uniform(20, 150) * MIB
    return lambda n: (-size * (n >= at), 0)


def _inputs_vary(rng: random.Random, steps: int, rate: float) -> Shape:
    sizes = [rng.uniform(0, 8) * rate for _ in range(steps)]
    return lambda n: (0, sizes[n])


def _slows_down(rng: random.Random, steps: int, rate: float) -> Shape:
    lasts = steps * rng.uniform(0.2, 0.6)
    return lambda n: (rate * lasts * (1 - math.exp(-n / lasts)), 0)


def _jump_at_the_end(rng: random.Random, steps: int, _: float) -> Shape:
    at, size = steps - rng.randint(1, 6), rng.uniform(10, 200) * MIB
    return lambda n: (size * (n >= at), 0)


RISING: dict[str, Pattern] = {
    "leak": _leak,
    "late leak": _late_leak,
    "stairs": _stairs,
    "leak and garbage": _leak_and_garbage,
    "leak after a fall": _leak_after_a_fall,
    "faster and faster": _faster_and_faster,
    "leak with a pause": _leak_with_a_pause,
}
HEALTHY: dict[str, Pattern] = {
    "steady": _steady,
    "warm-up": _warm_up,
    "jump": _jump,
    "garbage": _garbage,
    "cache that fills": _fills,
    "fall": _fall,
    "inputs vary": _inputs_vary,
}
UNCLEAR: dict[str, Pattern] = {
    "growth that slows down": _slows_down,
    "jump at the end": _jump_at_the_end,
}
PATTERNS = {**RISING, **HEALTHY, **UNCLEAR}


def course(rng: random.Random, name: str, steps: int, rate: float) -> Course:
    """Return the memory of a pattern in each of a number of steps. ``rate``: bytes a step."""
    shape = PATTERNS[name](rng, steps, rate)
    base, noise = rng.uniform(200, 900) * MIB, rng.choice((0.02, 0.2, 0.2, 1.0)) * MIB
    parts = [shape(n) for n in range(steps)]
    levels = [int(base + sum(part) + rng.gauss(0, noise)) for part in parts]
    lasting = [base + part[0] for part in parts]
    rise = lasting[-1] - min(lasting)
    is_clear = rise >= max(_CLEAR_MIB * MIB, _CLEAR_NOISE * noise)
    rises: bool | None = None
    if name in HEALTHY:
        rises = False
    elif name in RISING and is_clear:
        rises = True
    kept = rise / max(steps - 1, 1) if rises else 0.0
    return Course(name, levels, lasting, rises, kept)
