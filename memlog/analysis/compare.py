"""Runs side by side, with the change against the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from memlog.analysis.document import RunStatus
from memlog.analysis.figures import RunFigures
from memlog.analysis.gates import Gate, Unit, unit_of

SCHEMA = 1


class ComparedRun(msgspec.Struct, frozen=True):
    """A run of the comparison."""

    id: str
    name: str | None
    status: RunStatus
    steps: int


class Compared(msgspec.Struct, frozen=True):
    """One figure, in the order of the runs."""

    unit: Unit
    values: tuple[float | None, ...]
    changes_percent: tuple[float | None, ...]
    """Against the first run; ``None`` where either is unknown or the first is 0, and for the first itself."""


class Verdict(msgspec.Struct, frozen=True):
    """One gate on one run."""

    gate: str
    run: str
    figure: str
    unit: Unit
    first: float | None
    value: float | None
    failed: bool | None
    """``None`` where a figure that it needs is unknown: that is an error, not a pass."""


class Comparison(msgspec.Struct, frozen=True):
    """The document of ``memlog compare --json``."""

    schema: int
    runs: tuple[ComparedRun, ...]
    figures: dict[str, Compared]
    categories: dict[str, Compared]
    layers: dict[str, Compared]
    gates: tuple[Verdict, ...]


def compare(runs: Sequence[RunFigures], gates: Iterable[Gate] = ()) -> Comparison:
    """Puts runs side by side.

    Args:
        runs: The first is what the others are compared with.
        gates: Judged on each of the others.
    """
    names = dict.fromkeys(name for run in runs for name in run.figures)
    return Comparison(
        schema=SCHEMA,
        runs=tuple(ComparedRun(run.id, run.name, run.status, run.steps) for run in runs),
        figures={
            name: _compared(unit_of(name), [run.figures.get(name) for run in runs])
            for name in names
        },
        categories=_sizes([run.categories for run in runs], absent=0),
        layers=_sizes([run.layers for run in runs], absent=None),
        gates=tuple(_judge(gate, runs[0], run) for gate in gates for run in runs[1:]),
    )


def change_percent(first: float | None, value: float | None) -> float | None:
    """The change in per cent; ``None`` where it is unknown or has no meaning."""
    return None if first is None or value is None or not first else 100 * (value - first) / first


def _compared(unit: Unit, values: Sequence[float | None]) -> Compared:
    changes = (change_percent(values[0], value) for value in values[1:])
    return Compared(unit, tuple(values), (None, *changes))


def _sizes(tables: Sequence[Mapping[str, int]], absent: int | None) -> dict[str, Compared]:
    """Sizes by name, the largest first.

    Args:
        tables: One a run; an empty one knows nothing.
        absent: What it means where a table has others and not this one.
    """
    largest: dict[str, int] = {}
    for sizes in tables:
        for name, size in sizes.items():
            largest[name] = max(size, largest.get(name, 0))
    ordered = sorted(largest, key=lambda name: (-largest[name], name))
    return {
        name: _compared("bytes", [sizes.get(name, absent) if sizes else None for sizes in tables])
        for name in ordered
    }


def _judge(gate: Gate, first: RunFigures, run: RunFigures) -> Verdict:
    before, value = first.figures.get(gate.figure), run.figures.get(gate.figure)
    unknown = before is None or value is None or (gate.share and not before)
    failed = None if unknown else gate.fails(before or 0.0, value or 0.0)
    return Verdict(gate.text, run.id, gate.figure, unit_of(gate.figure), before, value, failed)
