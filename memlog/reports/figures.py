"""Figures of a run that can be compared: peaks, times, and what the worst traced step's peak consists of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from memlog._internal.terminal import format_bytes, format_number
from memlog.errors import TraceNotFoundError
from memlog.events import (
    ALLOCATED,
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

TIMES = (STEP_TIME, EVALUATION_TIME)

_MOST_TIMES = 100_000

Unit: TypeAlias = Literal["bytes", "ms", "ratio"]

PeakOrigin: TypeAlias = Literal["traced", "derived"]
"""``traced``: the figure is the worst traced step's peak. ``derived``: the worst traced step was the run's
first, and the figure is its peak with the optimizer's state from the start on, as in ``memlog advise``."""


class RunFigures(msgspec.Struct):
    """Figures of one run: bytes, milliseconds, and fragmentation from 0 to 1. ``None`` is unknown."""

    id: str
    name: str | None
    status: RunStatus
    steps: int | None
    figures: Mapping[str, float | None]
    """Figures by name, such as ``host.rss``, ``device.peak``, ``cuda0.peak``, ``step.time``."""
    categories: Mapping[str, int]
    """Bytes in use at the peak of the worst traced step, by category."""
    layers: Mapping[str, int]
    """Bytes of the largest layers at the worst traced step's peak, by path; other layers are unknown."""
    traced_peak: int | None
    """Peak of the worst traced step, in bytes. The figure ``trace.peak`` can differ (see `PeakOrigin`)."""
    trace_peak_from: PeakOrigin | None
    """Source of the figure ``trace.peak``; ``None`` if the figure is unknown."""
    trace_is_exact: bool | None = None
    """True if all of the worst traced step was traced; ``None``: no step was traced, or it is unknown."""
    repeats: dict[str, tuple[float, ...]] = {}
    """Values of the figures in several runs of one training, whose mean is then the figure."""


def unit_of(figure: str) -> Unit:
    if figure in TIMES:
        return "ms"
    return "ratio" if figure.endswith(".fragmentation") else "bytes"


def change_percent(first: float | None, value: float | None) -> float | None:
    """Return the change in percent; ``None`` if a value is unknown or the first is 0."""
    return None if first is None or value is None or not first else 100 * (value - first) / first


def value_text(unit: Unit, value: float | None) -> str:
    """Return a figure with its unit as text; ``"unknown"`` for ``None``."""
    if value is None:
        return "unknown"
    if unit == "bytes":
        return format_bytes(value)
    return f"{format_number(value)} ms" if unit == "ms" else format_number(value)


def repeated(runs: Sequence[RunFigures]) -> RunFigures:
    """Return the figures of one training that was run several times.

    A figure is the mean of its values. It is unknown if a run lacks it. Categories and layers are those of
    the run with the highest traced peak. The status is that of the first run that is not finished.
    """
    worst = max(runs, key=lambda run: run.traced_peak or 0)
    known: dict[str, tuple[float, ...]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        values = [run.figures.get(name) for run in runs]
        known[name] = tuple(value for value in values if value is not None)
    complete = {name: values for name, values in known.items() if len(values) == len(runs)}
    return RunFigures(
        id=runs[0].id if len(runs) == 1 else f"{runs[0].id} and {len(runs) - 1} more",
        name=runs[0].name if len({run.name for run in runs}) == 1 else None,
        status=next((run.status for run in runs if run.status != "finished"), "finished"),
        steps=sum(run.steps or 0 for run in runs),
        figures={
            name: statistics.fmean(complete[name]) if name in complete else None for name in known
        },
        categories=worst.categories,
        layers=worst.layers,
        traced_peak=worst.traced_peak,
        trace_peak_from=worst.trace_peak_from,
        trace_is_exact=worst.trace_is_exact,
        repeats=complete,
    )


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
        trace_is_exact=worst.exact if worst else None,
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
        # If later steps were traced, too, and needed no more, the first step's own peak is the
        # worst.
        return (worst.peak, "traced") if fold.later_traced else (None, None)
    return steady, "traced" if steady == worst.peak else "derived"


def _steady_peak(run: RunDirectory, worst: Trace) -> int | None:
    """Return the worst traced step's steady peak in bytes (see `steady_peak_of`); ``None``: unknown."""
    try:
        event, trace = read_worst_step(run)
    except TraceNotFoundError:
        return None
    # The file can be about another step than the journal's event, if one was saved in between.
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
        for reading in main_readings(event):
            if reading.device is not None:
                for name, value in (
                    (reading.name, reading.level),
                    (f"{reading.owner}.fragmentation", fragmentation(reading.device)),
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
            values = [
                value
                for name, value in known.items()
                if name.endswith(f".{measure}") and value is not None
            ]
            known[f"{ANY_DEVICE}.{measure}"] = max(values, default=None)
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
                # Every second one, so that the kept times are spread evenly over the run.
                self._kept = self._kept[::2]
                self._every *= 2
        self._count += 1

    def median_ms(self) -> float | None:
        """Return the median in milliseconds; ``None`` if there were fewer than two events."""
        return statistics.median(self._kept) / 1000 if self._kept else None
