"""Compare runs: their figures side by side, with the change against the first run, and judged gates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.facts.run_fold import RunStatus
from memlog.reports.figures import TRACE_PEAK, PeakOrigin, RunFigures, Unit, change_percent, unit_of
from memlog.reports.gates import Gate, GateResult, judge

SCHEMA = 1


class ComparedRun(msgspec.Struct, frozen=True):
    """A compared run, or an entry of a baseline file."""

    id: str
    """The run's id, or the name of the baseline file."""
    name: str | None
    """Name passed to ``init``, or of the baseline's entry."""
    status: RunStatus
    steps: int | None
    """Number of recorded steps; ``None`` for an entry of a baseline file."""
    traced_peak: int | None
    """The worst traced step's own peak, in bytes."""
    trace_peak_from: PeakOrigin | None
    """Source of the figure ``trace.peak``: the traced peak, or a peak derived from it; ``None``: unknown."""


class Compared(msgspec.Struct, frozen=True):
    """Values of one figure in all runs, in the order of the runs."""

    unit: Unit
    values: tuple[float | None, ...]
    """One value per run, ``None`` if it is unknown."""
    changes_percent: tuple[float | None, ...]
    """Changes against the first run, in percent. ``None`` for the first run itself, and if a value is unknown
    or the first run's value is 0."""


class Comparison(msgspec.Struct, frozen=True):
    """The document of ``memlog compare --json``."""

    schema: int
    """Version of the document."""
    runs: tuple[ComparedRun, ...]
    """The runs, in the order of the arguments."""
    figures: dict[str, Compared]
    """The figures of the table."""
    categories: dict[str, Compared]
    """Bytes live at ``traced_peak`` by category, the largest first."""
    layers: dict[str, Compared]
    """The same by layer."""
    gates: tuple[GateResult, ...]
    """One entry for each gate and run."""
    notes: tuple[str, ...]
    """Remarks on the figures, in whole sentences."""


def compare(
    runs: Sequence[RunFigures], gates: Iterable[Gate] = (), *, allow_unfinished: bool = False
) -> Comparison:
    """Compare all runs with the first one, and judge the gates for every run except the first.

    A run that stands alone is judged by gates whose limit is no change.
    With ``allow_unfinished``, gates are also judged for a run that failed, was killed or still runs.
    """
    # The run with the most figures comes first: it sets the order of the rows.
    fullest = sorted(runs, key=lambda run: -len(run.figures))
    names = dict.fromkeys(name for run in fullest for name in run.figures)
    first, judged = (runs[0], runs[1:]) if len(runs) > 1 else (None, runs)
    return Comparison(
        schema=SCHEMA,
        runs=tuple(
            ComparedRun(
                run.id, run.name, run.status, run.steps, run.traced_peak, run.trace_peak_from
            )
            for run in runs
        ),
        figures={
            name: _compared(unit_of(name), [run.figures.get(name) for run in runs])
            for name in names
        },
        categories=_sizes([run.categories for run in runs], absent=0),
        layers=_sizes([run.layers for run in runs], absent=None),
        gates=tuple(
            judge(gate, first, run, allow_unfinished=allow_unfinished)
            for gate in gates
            for run in judged
        ),
        notes=tuple(dict.fromkeys(note for run in runs for note in _notes(run))),
    )


def _notes(run: RunFigures) -> Iterator[str]:
    if run.status != "finished":
        yield f"Run {run.id} is not finished ({run.status}): its figures are of {run.steps} steps."
    if run.trace_is_exact is False:
        yield (
            f"{TRACE_PEAK} of run {run.id} may be too low: the step was not traced whole or not exactly. If "
            "its trace was cut short, memlog.init(budget=1) gives it more time."
        )
    if run.traced_peak is None or run.trace_peak_from == "traced":
        return
    traced = f"The largest traced step was the first ({format_bytes(run.traced_peak)})"
    if run.trace_peak_from == "derived":
        yield (
            f"{TRACE_PEAK} of run {run.id} is computed, not measured. {traced}, which begins without "
            "optimizer state; memlog computed the peak of a later step, which begins with that state. "
            "Categories and layers are those of the first step."
        )
    else:
        yield (
            f"{TRACE_PEAK} of run {run.id} is unknown. {traced}, which may have begun without optimizer "
            "state, and memlog can't compute the peak of later steps from it."
        )


def _compared(unit: Unit, values: Sequence[float | None]) -> Compared:
    changes = (change_percent(values[0], value) for value in values[1:])
    return Compared(unit, tuple(values), (None, *changes))


def _sizes(tables: Sequence[Mapping[str, int]], absent: int | None) -> dict[str, Compared]:
    """Return each name's sizes in all runs, the names with the largest sizes first.

    ``tables`` has one table for each run; an empty table means that the run's sizes are unknown. If a table
    has sizes but lacks a name, the size of that name is ``absent``.
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
