"""Check without memlog that faulty scripts grow and healthy ones do not.

``python -m benchmarks.insight.check_scripts [NAME …] [--seed N] [--jobs N]``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.insight.expected import Expected, load
from benchmarks.insight.series import MIB, Series, measure

LEAST_RATE = 0.3 * MIB
"""Minimum growth in bytes per step. A script that grows so fast counts as growing at any level of memory."""
LEAST_GROWTH = 0.2
"""Minimum growth over the run, divided by the level, for a script that grows slower than `LEAST_RATE`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time (default 1)")
    options = parser.parse_args()
    table = load()
    names = options.names or sorted(table, key=lambda name: (not table[name].faulty, name))
    print(
        "| script | steps | s | MiB at 20 % | MiB at the end | peak | MiB per step | growth | |\n|"
        + "---|" * 9
    )
    wrong = 0
    for name, outcome in measured(names, options.seed, options.jobs):
        complaint = outcome if isinstance(outcome, str) else judge(table[name], outcome)
        wrong += bool(complaint)
        print(row(name, outcome, complaint), flush=True)
    print(f"\n{wrong} of {len(names)} wrong")
    sys.exit(bool(wrong))


def measured(names: Iterable[str], seed: int, jobs: int) -> Iterator[tuple[str, Series | str]]:
    """Measure scripts, ``jobs`` at a time. Yield each with its series or, if it failed, the message."""

    def one(name: str) -> tuple[str, Series | str]:
        try:
            return name, measure(name, seed)
        except Exception as error:  # noqa: BLE001 # reported as this script's result
            return name, f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, names)


def judge(expected: Expected, series: Series) -> str:
    """Return a message if a script's series contradicts the expected one, else an empty text."""
    if len(series.levels) < 40:
        return f"only {len(series.levels)} steps"
    rate = series.rate()
    if not expected.grows:
        rise = _late_rise(series.levels)
        grows = rise > max(0.03 * series.levels[-1], 4 * MIB)
        return f"rises by {rise / MIB:.0f} MiB in the last quarter" if grows else ""
    if rate < LEAST_RATE and series.growth(0.2) < LEAST_GROWTH:
        return f"grows too little: {rate / MIB:.2f} MiB per step"
    if not expected.rate_mib[0] <= rate / MIB <= expected.rate_mib[1]:
        return f"rate {rate / MIB:.2f} is outside {expected.rate_mib}"
    return ""


def _late_rise(levels: Sequence[int]) -> int:
    """Return the bytes by which the maximum of the last quarter exceeds that of the quarter before.

    Maxima are compared because the average of a sawtooth depends on the point at which a quarter begins. The
    first half is left out: a cache may fill and a curriculum may end there.
    """
    half, quarter = len(levels) // 2, len(levels) // 4
    return max(levels[-quarter:]) - max(levels[half:-quarter])


def row(name: str, outcome: Series | str, complaint: str) -> str:
    """Return one line of the table."""
    if isinstance(outcome, str) or not outcome.levels:
        return f"| {name} |  |  |  |  |  |  |  | {complaint} |"
    levels = outcome.levels
    figures = [
        str(len(levels)),
        f"{outcome.seconds:.1f}",
        f"{levels[len(levels) // 5] / MIB:.0f}",
        f"{levels[-1] / MIB:.0f}",
        f"{max(levels) / MIB:.0f}",
        f"{outcome.rate() / MIB:.3f}",
        f"{outcome.growth():.0%}",
    ]
    return f"| {name} | {' | '.join(figures)} | {complaint} |"


if __name__ == "__main__":
    main()
