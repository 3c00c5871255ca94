"""Gates: conditions on a run's figures that make a command or a test fail, and the baseline file.

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

A file has one entry for each training, by the name of its runs. It is sorted JSON, so that a change of the
file shows what a change of the code did::

    {
      "schema": 1,
      "trainings": {
        "tiny model": {
          "categories": {"activations": 31457280, "parameters": 1572864},
          "figures": {"host.rss": [426246144, 426512384, 426790912], "trace.peak": 42782720},
          "layers": {"block1": 5242880}
        }
      }
    }

Sizes are bytes. A figure that differs from run to run stands there with its value in each repeat. It is left
out if there was one run only. Times are left out, because they are those of one machine.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from memlog._internal.safe_files import replacing
from memlog._internal.terminal import one_line
from memlog._internal.text_parser import DEVICE_MEASURES, ComparisonSign, Reader
from memlog.errors import ConfigurationError, RunNotFoundError
from memlog.events import HOST_PEAKS, HOST_RSS, TREE
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
    compared = [side for side in (first if gate.is_change else None, run) if side is not None]
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
    # If both ends of the interval give the same answer, the repeats are enough.
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
    # The limit is a multiple of the first side's mean, and so is the error that this mean adds.
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


UNNAMED_TRAINING = "training"
"""Name of the entry of runs without a name."""
_SHOWN = 5
"""Maximum number of names that a message lists."""
_DETERMINISTIC = (TRACE_PEAK, "device.peak", "device.allocated")
"""Figures that count the bytes of tensors. So one run is enough."""
_NOISY = (HOST_RSS, TREE, "device.reserved")
"""Figures that differ from run to run. A file has them only with the values of several repeats."""

_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
_Values: TypeAlias = Annotated[list[_Number], msgspec.Meta(min_length=1)]


class Baseline(msgspec.Struct, frozen=True):
    """Figures of one training, in bytes. A list has one value for each repeat."""

    figures: dict[str, _Number | _Values] = {}
    categories: dict[str, int] = {}
    layers: dict[str, int] = {}

    def as_run(self, file: Path, name: str) -> RunFigures:
        """Return the entry in the form of a run, whose id is the name of the file."""
        repeats = {
            figure: tuple(value) if isinstance(value, list) else (value,)
            for figure, value in self.figures.items()
        }
        return RunFigures(
            id=file.name,
            name=name,
            status="finished",
            steps=None,
            figures={figure: fmean(values) for figure, values in repeats.items()},
            categories=self.categories,
            layers=self.layers,
            traced_peak=None,
            trace_peak_from=None,
            repeats=repeats,
        )


class _File(msgspec.Struct):
    schema: Literal[1]
    trainings: dict[str, Baseline]


def baseline_of(run: RunFigures) -> Baseline:
    """Return the entry of a training for a baseline file. ``run`` may be the figures of several repeats."""
    kept: dict[str, float | list[float]] = {}
    for name in (*_DETERMINISTIC, *_NOISY):
        value = run.figures.get(name)
        if value is None:
            continue
        values = sorted(run.repeats.get(name, (value,)))
        if len(set(values)) == 1 and (name in _DETERMINISTIC or len(values) > 1):
            kept[name] = _short(values[0])
        elif len(values) > 1:
            kept[name] = [_short(number) for number in values]
    return Baseline(kept, dict(run.categories), dict(run.layers))


def read_baselines(file: Path) -> dict[str, Baseline]:
    """Return the entries of a baseline file, by the trainings' names.

    Raises:
        ConfigurationError: The file does not exist, can't be read, or is no baseline file.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no baseline file {file}: the same command with --update writes it"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"can't read the baseline file {file}: {error.strerror}") from None
    try:
        return msgspec.json.decode(content, type=_File).trainings
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{file} is no baseline file of memlog ({one_line(str(error))}): restore it, or delete it and "
            "write it again with --update"
        ) from None


def update_baselines(file: Path, changed: Mapping[str, Baseline]) -> dict[str, Baseline]:
    """Write the entries of trainings into a baseline file, which may be missing. Other entries stay.

    Return the entries before.

    Raises:
        ConfigurationError: The file exists and is no baseline file.
        OSError: The file can't be written, or its folder does not exist.
    """
    before = read_baselines(file) if file.exists() else {}
    trainings = msgspec.to_builtins({**before, **changed})
    document = {"schema": 1, "trainings": _shortened(trainings)}
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
    with replacing(file.absolute().parent, file.name) as written:
        written.write(f"{text}\n".encode())
    return before


def find_baseline(file: Path, trainings: Mapping[str, Baseline], name: str) -> RunFigures:
    """Return the entry of the training ``name``, in the form of a run.

    Raises:
        RunNotFoundError: The file has no such entry.
    """
    if name not in trainings:
        names = sorted(trainings)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise RunNotFoundError(
            f"{file} has no training {name!r}, only {', '.join(map(repr, names[:_SHOWN])) or 'none'}{more}: "
            "add it with --update, or give the run one of these names"
        )
    return trainings[name].as_run(file, name)


def _shortened(value: Any) -> Any:
    """Return a document with `_short` numbers, so that an entry that was only read back stays as it was."""
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return _short(value) if isinstance(value, float) else value


def _short(value: float) -> float:
    """Return a whole number as an integer, and another one with three decimals."""
    return int(value) if value == int(value) else round(value, 3)
