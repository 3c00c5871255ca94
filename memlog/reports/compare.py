"""Compare runs: their figures side by side, with the change against the first run, and gates.

::

    FIGURE COMPARISON CHANGE

    FIGURE      host.rss  host.tree  … (`memlog.events.HOST_PEAKS`)  trace.peak  step.time  evaluation.time
                device.peak  device.allocated  device.reserved  device.fragmentation  (maximum of all devices)
                cuda0.peak …                                                    (of one device)
    COMPARISON  >  >=  <  <=
    CHANGE      +5%  -30%  +100 MiB  +20 ms  +0.1 (fragmentation only), against the first run

A gate fails if its condition is true. ``device.peak > +5%`` allows at most 5 % more than in the first run.
``device.peak > -30%`` requires that a run saves at least 30 %.
"""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from memlog._internal.terminal import format_bytes
from memlog._internal.text_parser import DEVICE_MEASURES, ComparisonSign, Reader
from memlog.errors import TraceNotFoundError
from memlog.events import (
    ALLOCATED,
    HOST_PEAKS,
    HOST_RSS,
    OTHER_PROCESSES,
    TREE,
    Batch,
    Evaluation,
    Event,
    Phase,
    Run,
    Trace,
    main_readings,
)
from memlog.facts.run_fold import RunFold, RunStatus
from memlog.journal import Entry, RunDirectory
from memlog.metrics import fragmentation
from memlog.reports.worst_step import read_worst_step
from memlog.trace.predict import steady_peak_of

STEP_TIME = "step.time"
EVALUATION_TIME = "evaluation.time"
TRACE_PEAK = "trace.peak"
ANY_DEVICE = "device"

_MOST_TIMES = 100_000

PeakOrigin: TypeAlias = Literal["traced", "derived"]
"""``traced``: the figure is the worst traced step's peak. ``derived``: the worst traced step was the run's
first, and the figure is its peak with the optimizer's state from the start on, as in ``memlog advise``."""


class RunFigures(msgspec.Struct):
    """Figures of one run: bytes, milliseconds, and fragmentation from 0 to 1. ``None`` is unknown."""

    id: str
    name: str | None
    status: RunStatus
    steps: int
    figures: dict[str, float | None]
    """Figures by name, such as ``host.rss``, ``device.peak``, ``cuda0.peak``, ``step.time``."""
    categories: dict[str, int]
    """Bytes in use at the peak of the worst traced step, by category."""
    layers: dict[str, int]
    """Bytes of the largest layers at the worst traced step's peak, by path; other layers are unknown."""
    traced_peak: int | None
    """Peak of the worst traced step, in bytes. The figure ``trace.peak`` can differ (see `PeakOrigin`)."""
    trace_peak_from: PeakOrigin | None
    """Source of the figure ``trace.peak``; ``None`` if the figure is unknown."""


def run_figures(run: RunDirectory) -> RunFigures:
    # Checked before reading: if the run ends in between, the journal has its end event when it is read.
    alive = run.is_alive()
    fold = _Fold(judge=False)  # a comparison shows no verdict
    for file in run.files():
        fold.take_all(file.read(complete=not alive))
    facts = fold.facts
    worst = facts.traces.worst
    figures = fold.figures()
    peak, origin = _trace_peak(run, fold)
    figures[TRACE_PEAK] = peak
    return RunFigures(
        id=run.id,
        name=fold.name,
        status=facts.status(alive=alive),
        steps=facts.steps,
        figures=figures,
        categories=dict(worst.at_peak) if worst else {},
        layers={
            layer.path: layer.at_peak
            for layer in (worst.layers if worst else ())
            if layer.at_peak is not None
        },
        traced_peak=worst.peak if worst else None,
        trace_peak_from=origin,
    )


def _trace_peak(run: RunDirectory, fold: _Fold) -> tuple[int | None, PeakOrigin | None]:
    """Return the value of ``trace.peak``, in bytes, and its source.

    The value is the peak of the worst traced step. If this step is the run's first step, the value is the
    steady peak (see `steady_peak_of`), because the optimizer's state did not exist during most of the step.
    """
    worst = fold.facts.traces.worst
    if worst is None or worst.peak is None:
        return None, None
    if not fold.is_first(worst):
        return worst.peak, "traced"
    steady = _steady_peak(run, worst)
    if steady is None:
        return (worst.peak, "traced") if fold.later_traced else (None, None)
    return steady, "traced" if steady == worst.peak else "derived"


def _steady_peak(run: RunDirectory, worst: Trace) -> int | None:
    """Return the worst traced step's steady peak in bytes (see `steady_peak_of`); ``None``: unknown."""
    try:
        event, trace = read_worst_step(run)
    except TraceNotFoundError:
        return None
    return steady_peak_of(trace) if event.time_us == worst.time_us else None


class _Fold:
    """Figures that only comparisons need, beside the facts about the run."""

    def __init__(self, *, judge: bool) -> None:
        self.facts = RunFold(judge=judge)
        self.name: str | None = None
        self.later_traced = False
        self._levels: dict[str, float] = {}
        self._step_times = _Times()
        self._evaluation_times = _Times()

    def take_all(self, entries: Iterable[Entry]) -> None:
        """Add all events of one process."""
        self._step_times.begin()
        self._evaluation_times.begin()
        for entry in entries:
            self.facts.take_entry(entry)
            self._take(entry.event)

    def _take(self, event: Event) -> None:
        if not isinstance(event, Phase):
            self._read_devices(event)
        if isinstance(event, Batch):
            self._step_times.take(event.time_us, event.step)
        elif isinstance(event, Evaluation):
            self._evaluation_times.take(event.time_us, event.evaluation)
        elif isinstance(event, Trace):
            self.later_traced = self.later_traced or not self.is_first(event)
        elif isinstance(event, Run):
            self.name = self.name or event.name

    def is_first(self, trace: Trace) -> bool:
        """Return True if the traced step is, or may be, the run's first step."""
        first = self.facts.first_step
        return trace.step is None or first is None or trace.step <= first

    def _read_devices(self, event: Event) -> None:
        for each in main_readings(event):
            if each.device is not None:
                for name, value in (
                    (each.name, each.level),
                    (f"{each.owner}.fragmentation", fragmentation(each.device)),
                ):
                    if value is not None and value >= self._levels.get(name, 0.0):
                        self._levels[name] = value

    def figures(self) -> dict[str, float | None]:
        """Return the figures by name. An unknown figure is ``None``.

        If a figure of the control group or of a single device is unknown, the result lacks this figure.
        """
        known: dict[str, float | None] = {HOST_RSS: None, TREE: None}
        for kind, peak in self.facts.peaks.summary().items():
            if kind.endswith(OTHER_PROCESSES):
                continue  # no memory of the run
            # The peak that the summary calls `cuda0.allocated` is the figure `cuda0.peak`.
            is_device = kind.endswith(ALLOCATED)
            known[kind.removesuffix(ALLOCATED) + ".peak" if is_device else kind] = peak.bytes
        known.update(self._levels)
        for measure in ("peak", "allocated", "reserved", "fragmentation"):
            each = [
                value
                for name, value in known.items()
                if name.endswith(f".{measure}") and value is not None
            ]
            known[f"{ANY_DEVICE}.{measure}"] = max(each, default=None)
        known[TRACE_PEAK] = None  # sets the order of the figures; `run_figures` sets the value
        known[STEP_TIME] = self._step_times.median_ms()
        known[EVALUATION_TIME] = self._evaluation_times.median_ms()
        return known


class _Times:
    """Times from one step or evaluation to the next. If there are many, only a part of them is kept."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._every = 1
        self._count = 0
        self._before: tuple[int, int] | None = None

    def begin(self) -> None:
        """Prepare for another process's events. The time between events of two processes is not measured."""
        self._before = None

    def take(self, time_us: int, number: int) -> None:
        before, self._before = self._before, (time_us, number)
        if before is None or time_us < before[0] or number <= before[1]:
            return
        if self._count % self._every == 0:
            # Two events are several steps apart if the user set `every`, or if the journal was thinned.
            self._kept.append((time_us - before[0]) / (number - before[1]))
            if len(self._kept) >= _MOST_TIMES:
                self._kept = self._kept[::2]
                self._every *= 2
        self._count += 1

    def median_ms(self) -> float | None:
        """Return the median in milliseconds; ``None`` if there were fewer than two events."""
        return statistics.median(self._kept) / 1000 if self._kept else None


Unit: TypeAlias = Literal["bytes", "ms", "ratio"]

_TIMES = (STEP_TIME, EVALUATION_TIME)
_FIGURES = (
    *HOST_PEAKS,
    *(f"device.{measure}" for measure in DEVICE_MEASURES),
    TRACE_PEAK,
    *_TIMES,
)
_MILLISECONDS = {"ms": 1.0, "s": 1000.0}
_EXAMPLES = {
    "bytes": "+5% or +100 MiB",
    "ms": "+5% or +20 ms",
    "ratio": "+5% or +0.1",
}


class Gate(msgspec.Struct, frozen=True):
    text: str
    """The gate as the user wrote it."""
    figure: str
    comparison: ComparisonSign
    amount: float
    """Limit for the figure's change since the first run, in the figure's unit. If ``share`` is True, the
    limit is a fraction of the first run's figure."""
    share: bool

    def fails(self, first: float, value: float) -> bool:
        """Return True if the gate's condition is true for a run with the figure ``value``.

        ``first`` is the first run's figure. ``first`` must not be 0 if ``share`` is True.
        """
        change = (value - first) / first if self.share else value - first
        if self.comparison == ">":
            return change > self.amount
        if self.comparison == ">=":
            return change >= self.amount
        return change < self.amount if self.comparison == "<" else change <= self.amount


def unit_of(figure: str) -> Unit:
    if figure in _TIMES:
        return "ms"
    return "ratio" if figure.endswith(".fragmentation") else "bytes"


def parse_gate(text: str) -> Gate:
    """Parse a gate.

    Raises:
        ConfigurationError: The text is not a valid gate. The message has three lines: the remedy, the gate,
            and a caret under the error.
    """
    return _Parser(text, "a gate").gate()


class _Parser(Reader):
    def gate(self) -> Gate:
        figure = self._figure()
        comparison = self.comparison()
        if comparison is None:
            raise self.error("write >, >=, < or <=")
        amount, share = self._change(figure)
        self.end("gate")
        return Gate(self._text.strip(), figure, comparison, amount, share)

    def _figure(self) -> str:
        token = self.next
        if self.took_word(*_FIGURES):
            return token.text
        self.refuse_torchs_name()
        device = self.device()
        if device is not None:
            return ".".join(device)
        close = difflib.get_close_matches(token.text, _FIGURES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise self.error(
            f"{hint}figures are {', '.join(_FIGURES)}; for one device, write cuda0.peak"
        )

    def _change(self, figure: str) -> tuple[float, bool]:
        unit = unit_of(figure)
        example = _EXAMPLES[unit]
        sign = -1.0 if self.next.text == "-" else 1.0
        if not (self.took_sign("+") or self.took_sign("-")):
            raise self.error(
                f"write + or - before the number: a gate is a change since the first run, such as {example}"
            )
        number = self.next
        if number.kind != "number":
            raise self.error(f"write a change such as {example}")
        self.take()
        if self.took_sign("%"):
            return sign * float(number.text) / 100, True
        if unit == "bytes":
            return sign * self.size(number), False
        factor = 1.0 if unit == "ratio" else _MILLISECONDS.get(self.next.text)
        if factor is None:
            raise self.error("write the unit here: ms, s or %")
        if unit == "ms":
            self.take()
        return sign * float(number.text) * factor, False


SCHEMA = 1


class ComparedRun(msgspec.Struct, frozen=True):
    id: str
    name: str | None
    status: RunStatus
    steps: int
    traced_peak: int | None
    """The worst traced step's own peak, in bytes."""
    trace_peak_from: PeakOrigin | None
    """Source of the figure ``trace.peak``: the traced peak, or a peak derived from it; ``None``: unknown."""


class Compared(msgspec.Struct, frozen=True):
    """Values of one figure in all runs, in the order of the runs."""

    unit: Unit
    values: tuple[float | None, ...]
    changes_percent: tuple[float | None, ...]
    """Changes against the first run, in percent. ``None`` for the first run itself, and if a value is unknown
    or the first run's value is 0."""


class GateResult(msgspec.Struct, frozen=True):
    """Result of one gate for one run."""

    gate: str
    run: str
    figure: str
    unit: Unit
    first: float | None
    value: float | None
    failed: bool | None
    """True if the gate's condition is true. ``None``: the gate could not be judged, which is an error."""
    why: str | None
    """Reason why the gate could not be judged."""


class Comparison(msgspec.Struct, frozen=True):
    """The document of ``memlog compare --json``."""

    schema: int
    runs: tuple[ComparedRun, ...]
    figures: dict[str, Compared]
    categories: dict[str, Compared]
    layers: dict[str, Compared]
    gates: tuple[GateResult, ...]
    notes: tuple[str, ...]
    """Remarks on the figures, in whole sentences."""


def compare(
    runs: Sequence[RunFigures], gates: Iterable[Gate] = (), *, allow_unfinished: bool = False
) -> Comparison:
    """Compare all runs with the first one, and judge the gates for every run except the first.

    With ``allow_unfinished``, gates are also judged for a run that failed, was killed or still runs.
    """
    # The run with the most figures comes first: it sets the order of the rows.
    fullest = sorted(runs, key=lambda run: -len(run.figures))
    names = dict.fromkeys(name for run in fullest for name in run.figures)
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
            _judge(gate, runs[0], run, allow_unfinished) for gate in gates for run in runs[1:]
        ),
        notes=tuple(dict.fromkeys(note for run in runs for note in _notes(run))),
    )


def _notes(run: RunFigures) -> Iterator[str]:
    if run.status != "finished":
        yield f"Run {run.id} is not finished ({run.status}): its figures are of {run.steps} steps."
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


def change_percent(first: float | None, value: float | None) -> float | None:
    """Return the change in percent; ``None`` if a value is unknown or the first is 0."""
    return None if first is None or value is None or not first else 100 * (value - first) / first


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


def _judge(gate: Gate, first: RunFigures, run: RunFigures, allow_unfinished: bool) -> GateResult:
    before, value = first.figures.get(gate.figure), run.figures.get(gate.figure)
    why = None if allow_unfinished else _unfinished(first, run)
    why = why or _unknown(gate, before, value, run)
    failed = None if why else gate.fails(before or 0.0, value or 0.0)
    return GateResult(
        gate.text, run.id, gate.figure, unit_of(gate.figure), before, value, failed, why
    )


def _unfinished(*runs: RunFigures) -> str | None:
    for run in runs:
        if run.status != "finished":
            return (
                f"run {run.id} is not finished ({run.status}); --allow-unfinished judges it anyway"
            )
    return None


def _unknown(gate: Gate, before: float | None, value: float | None, run: RunFigures) -> str | None:
    if before is None:
        return f"{gate.figure} is unknown in the first run"
    if value is None:
        return f"{gate.figure} is unknown in run {run.id}"
    return f"{gate.figure} is 0 in the first run" if gate.share and not before else None
