"""Gates: conditions on a run's figures that make a command or a test fail.

::

    FIGURE COMPARISON LIMIT

    FIGURE      host.rss  host.tree  … (`memlog.events.HOST_PEAKS`)  trace.peak  step.time  evaluation.time
                device.peak  device.allocated  device.reserved  device.fragmentation  (maximum of all devices)
                cuda0.peak …                                                    (of one device)
    COMPARISON  >  >=  <  <=
    LIMIT       600 MiB  20 ms  0.1 (fragmentation only)
                +5%  -30%  +100 MiB  +20 ms  +0.1: a change since the first run

A gate fails if its condition is true. ``trace.peak > 600 MiB`` allows at most 600 MiB. ``device.peak > +5%``
allows at most 5 % more than in the first run. ``device.peak > -30%`` requires that a run saves at least 30 %.

If a training was run several times (`memlog.reports.figures.repeated`), a gate judges the mean of the repeats
by its 99 % interval. It fails if all of the interval meets the condition, passes if nothing of it does, and
can't be judged otherwise. The interval is Student's, with one variance for both sides, because the noise is
that of one training: so the first side may have one value alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from math import sqrt
from statistics import fmean

import msgspec

from memlog._internal.text_parser import DEVICE_MEASURES, ComparisonSign, Reader
from memlog.events import HOST_PEAKS
from memlog.facts.later_memory import student_quantiles
from memlog.reports.figures import (
    TIMES,
    TRACE_PEAK,
    RunFigures,
    Unit,
    change_percent,
    unit_of,
    value_text,
)

FIGURES = (
    *HOST_PEAKS,
    *(f"device.{measure}" for measure in DEVICE_MEASURES),
    TRACE_PEAK,
    *TIMES,
)
"""Names of the figures, without those of single devices."""
_MILLISECONDS = {"ms": 1.0, "s": 1000.0}
_EXAMPLES = {
    "bytes": "+5% or +100 MiB",
    "ms": "+5% or +20 ms",
    "ratio": "+5% or +0.1",
}
_ABSOLUTE = {"bytes": "600 MiB", "ms": "20 ms", "ratio": "0.1"}


class Gate(msgspec.Struct, frozen=True):
    text: str
    """The gate as the user wrote it."""
    figure: str
    comparison: ComparisonSign
    amount: float
    """Limit in the figure's unit. If ``share`` is True, the limit is a fraction of the first run's figure."""
    share: bool
    is_change: bool
    """True if the limit is one for the change since the first run, False if it is one for the figure."""

    def excess(self, first: float, value: float) -> float:
        """Return the distance from the limit to the figure ``value``, in the figure's unit.

        ``first`` is the first run's figure.
        """
        if not self.is_change:
            return value - self.amount
        return value - first - (self.amount * first if self.share else self.amount)

    def fails(self, excess: float) -> bool:
        """Return True if the gate's condition is true at this distance from the limit."""
        if self.comparison == ">":
            return excess > 0
        if self.comparison == ">=":
            return excess >= 0
        return excess < 0 if self.comparison == "<" else excess <= 0


class GateResult(msgspec.Struct, frozen=True):
    """Result of one gate for one run."""

    gate: str
    """The gate, as it was written."""
    run: str
    """The judged run's id."""
    figure: str
    """The figure's name."""
    unit: Unit
    first: float | None
    """The first run's figure; ``None`` if it is unknown, or if the gate's limit is no change."""
    value: float | None
    """The judged run's figure; ``None`` if it is unknown."""
    failed: bool | None
    """True if the gate's condition is true. ``None``: the gate could not be judged, which is an error."""
    why: str | None
    """Reason why the gate could not be judged."""

    @property
    def text(self) -> str:
        """The result in one sentence, with the compared values."""
        if self.failed is None:
            return f"the gate {self.gate!r} can't be judged: {self.why}"
        change = change_percent(self.first, self.value)
        percent = "" if change is None else f" ({change:+.1f} %)"
        values = [value_text(self.unit, self.value)]
        if self.first is not None:
            values.append(value_text(self.unit, self.first))
        verb = "failed" if self.failed else "passed"
        return (
            f"the gate {self.gate!r} {verb}: run {self.run} has {' against '.join(values)}{percent}"
        )


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
        is_change = self.next.text in ("+", "-")
        amount, share = self._limit(figure, is_change=is_change)
        self.end("gate")
        return Gate(self._text.strip(), figure, comparison, amount, share, is_change)

    def _figure(self) -> str:
        token = self.next
        if self.took_word(*FIGURES):
            return token.text
        self.refuse_torchs_name()
        device = self.device()
        if device is not None:
            return ".".join(device)
        close = difflib.get_close_matches(token.text, FIGURES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise self.error(
            f"{hint}figures are {', '.join(FIGURES)}; for one device, write cuda0.peak"
        )

    def _limit(self, figure: str, *, is_change: bool) -> tuple[float, bool]:
        unit = unit_of(figure)
        sign = -1.0 if self.next.text == "-" else 1.0
        begin = self.take() if is_change else self.next
        number = self.next
        if number.kind != "number":
            absolute = "" if is_change else f", or a limit such as {_ABSOLUTE[unit]}"
            raise self.error(f"write a change such as {_EXAMPLES[unit]}{absolute}")
        self.take()
        if self.took_sign("%"):
            if not is_change:
                raise self.error(
                    "write + or - before the number: a gate in per cent is a change since the first run, "
                    f"such as {_EXAMPLES[unit]}",
                    begin,
                )
            return sign * float(number.text) / 100, True
        if unit == "bytes":
            return sign * self.size(number), False
        factor = 1.0 if unit == "ratio" else _MILLISECONDS.get(self.next.text)
        if factor is None:
            raise self.error("write the unit here: ms, s or %")
        if unit == "ms":
            self.take()
        return sign * float(number.text) * factor, False


def judge(
    gate: Gate, first: RunFigures | None, run: RunFigures, *, allow_unfinished: bool = False
) -> GateResult:
    """Judge a gate for a run. ``first`` is the run with which ``run`` is compared; ``None``: there is none.

    With ``allow_unfinished``, a run that failed, was killed or still runs is judged by what it has.
    """
    before = first.figures.get(gate.figure) if first is not None and gate.is_change else None
    value = run.figures.get(gate.figure)
    compared = [each for each in (first if gate.is_change else None, run) if each is not None]
    why = None if allow_unfinished else _unfinished(compared)
    why = why or _unknown(gate, first, run)
    failed = None
    if why is None:
        failed, why = _verdict(gate, _values(gate, first), _values(gate, run))
    return GateResult(
        gate.text, run.id, gate.figure, unit_of(gate.figure), before, value, failed, why
    )


def _values(gate: Gate, run: RunFigures | None) -> Sequence[float]:
    """Return the values of a gate's figure in all repeats of a training; empty if the figure is unknown."""
    if run is None:
        return ()
    value = run.figures.get(gate.figure)
    return run.repeats.get(gate.figure) or (() if value is None else (value,))


def _verdict(
    gate: Gate, before: Sequence[float], values: Sequence[float]
) -> tuple[bool | None, str | None]:
    """Return whether the gate fails; ``None`` and the reason if the interval contains the limit."""
    before = before if gate.is_change else ()
    first = fmean(before) if before else 0.0
    excess = gate.excess(first, fmean(values))
    error = _half_interval(gate, before, values)
    low, high = (gate.fails(excess + side) for side in (-error, error))
    if low == high:
        return low, None
    count = len(values)
    more = f"{count} repeats" if count > 1 else "one run"
    shown = (value_text(unit_of(gate.figure), fmean(values) + side) for side in (-error, error))
    return None, (
        f"the mean of {gate.figure} in {more} lies between {' and '.join(shown)} with a confidence of 99 %, "
        "and the limit is within: record more repeats"
    )


def _half_interval(gate: Gate, before: Sequence[float], values: Sequence[float]) -> float:
    """Return half of the 99 % interval of `Gate.excess`; 0 if neither side has repeats."""
    free = sum(len(side) - 1 for side in (before, values) if side)
    if not free:
        return 0.0
    squares = sum((value - fmean(side)) ** 2 for side in (before, values) for value in side)
    factor = 1 + gate.amount if gate.share else 1.0
    spread = 1 / len(values) + (factor**2 / len(before) if before else 0.0)
    return student_quantiles(free)[1] * sqrt(squares / free * spread)


def _unfinished(runs: Sequence[RunFigures]) -> str | None:
    for run in runs:
        if run.status != "finished":
            return (
                f"run {run.id} is not finished ({run.status}); --allow-unfinished judges it anyway"
            )
    return None


def _unknown(gate: Gate, first: RunFigures | None, run: RunFigures) -> str | None:
    """Return why a figure that the gate needs is missing; ``None``: nothing is missing."""
    if gate.is_change:
        before = None if first is None else first.figures.get(gate.figure)
        where = "the first run" if first is None or first.steps is not None else first.id
        if before is None:
            return f"{gate.figure} is unknown in {where}"
        if gate.share and not before:
            return f"{gate.figure} is 0 in {where}"
    if run.figures.get(gate.figure) is None:
        return f"{gate.figure} is unknown in run {run.id}"
    return None
