"""Gates: conditions, written as text, that make a comparison fail in continuous integration.

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
from typing import Literal, TypeAlias

import msgspec

from memlog._internal.text_parser import DEVICE_MEASURES, ComparisonSign, Reader
from memlog.events import HOST_PEAKS
from memlog.reports.figures import EVALUATION_TIME, STEP_TIME, TRACE_PEAK

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
