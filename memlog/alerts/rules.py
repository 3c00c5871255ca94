"""Alert rules as text, short enough for one line of a YAML file.

::

    [LEVEL:] FIGURE COMPARISON AMOUNT [for N steps] [as LEVEL]
    [LEVEL:] FIGURE grows >|>= AMOUNT/[N] epoch|step [for N epochs|steps] [as LEVEL]

    FIGURE      host.rss  host.tree  host.available
                device.allocated  device.reserved  device.peak  device.fragmentation   (any device)
                cuda0.allocated …                                                      (that one)
    COMPARISON  >  >=  <  <=
    AMOUNT      32 GiB   80%   0.4 (fragmentation alone)
    LEVEL       info  warning  error   (warning, where none is named)

Sizes are written in B, KiB, MiB, GiB or TiB; KB, MB, GB and TB mean the same: everywhere in memlog "MB"
is 1024² bytes. ``%`` is of the memory that the host's control group allows (or the machine has), of the
device's capacity, or, for fragmentation, of one.

A level in front makes YAML take an unquoted rule for a mapping; ``as error`` at its end does not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from memlog.errors import ConfigurationError

Level: TypeAlias = Literal["info", "warning", "error"]
Comparison: TypeAlias = Literal[">", ">=", "<", "<="]
GrowthAxis: TypeAlias = Literal["epoch", "step"]

HOST_FIGURES = ("host.rss", "host.tree", "host.available")
DEVICE_MEASURES = ("allocated", "reserved", "peak", "fragmentation")
SAMPLED_FIGURES = ("host.tree", "host.available")
"""Figures that the helper process reads, about once a second."""

MAX_LENGTH = 200
MAX_COUNT = 10**9
"""Steps or epochs that a rule may name."""

_LEVELS: tuple[Level, ...] = get_args(Level)
_COMPARISONS: tuple[Comparison, ...] = get_args(Comparison)
_FIGURES = (*HOST_FIGURES, *(f"device.{measure}" for measure in DEVICE_MEASURES))
_SIZES = {"b": 1} | {
    unit: 1024**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit in (f"{prefix}b", f"{prefix}ib")
}
_LARGEST_SIZE = 2**63
_SIZE_NAMES = "B, KiB, MiB, GiB or TiB"
_DEVICE = re.compile(r"[a-z]+[0-9]+", re.ASCII)
_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_.]*)"
    r"|(?P<sign>[<>]=?|.)",
    re.ASCII | re.DOTALL,
)


class Growth(msgspec.Struct, frozen=True):
    """A rule about how fast a figure grows: over how many epochs or steps."""

    every: int
    axis: GrowthAxis

    def __str__(self) -> str:
        """``epoch``, ``100 steps``."""
        return self.axis if self.every == 1 else f"{self.every} {self.axis}s"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule, understood."""

    text: str
    """As it was written."""
    figure: str
    """One of `HOST_FIGURES`, or ``device.`` and one of `DEVICE_MEASURES`."""
    device: str | None = None
    """The one device that is meant; ``None``: each."""
    comparison: Comparison
    amount: float
    """Bytes; where ``share``, a part of the limit, 0 to 1; for fragmentation a number from 0 to 1."""
    share: bool = False
    said: str
    """The amount as it was written: ``32 GiB``."""
    growth: Growth | None = None
    hold: int = 1
    """Number of steps (of epochs, for growth an epoch) for which it has to hold."""
    level: Level = "warning"

    @property
    def sampled(self) -> bool:
        """Whether the helper process judges it."""
        return self.figure in SAMPLED_FIGURES

    @property
    def attribute(self) -> str:
        """The figure's last part: ``rss``, ``allocated``."""
        return self.figure.partition(".")[2]

    @property
    def upward(self) -> bool:
        """Whether high values are what it warns of."""
        return self.comparison in (">", ">=")

    @property
    def held_axis(self) -> GrowthAxis:
        """What ``hold`` counts."""
        return "step" if self.growth is None else self.growth.axis


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Parses several rules; the same text twice is one rule.

    Raises:
        ConfigurationError: see `parse_rule`.
    """
    return tuple(parse_rule(text) for text in dict.fromkeys(texts))


def parse_rule(text: str) -> Rule:
    """Parses a rule.

    Raises:
        ConfigurationError: it is none. The message has three lines: what would be right, the rule, and
            a caret under the place.
    """
    if len(text) > MAX_LENGTH:
        raise _error(text[:MAX_LENGTH], MAX_LENGTH - 1, f"write at most {MAX_LENGTH} characters")
    return _Parser(text).rule()


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class _Amount(NamedTuple):
    value: float
    share: bool
    said: str


class _Parser:
    """Reads one rule from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [
            _Token(str(match.lastgroup), match.group(), match.start(), match.end())
            for match in _TOKEN.finditer(text)
            if not match.group().isspace()
        ]
        end = len(text.rstrip())
        self._tokens.append(_Token("end", "", end, end))
        self._at = 0

    def rule(self) -> Rule:
        level = self._level_before()
        figure, device = self._figure()
        grows = self._took_word("grows")
        comparison = self._comparison(upward_only=grows)
        amount = self._amount(figure)
        growth = self._growth(figure) if grows else None
        hold = self._hold("epoch" if growth is not None and growth.axis == "epoch" else "step")
        level = self._level_after(level)
        if self._next.kind != "end":
            raise self._error("the rule is over here: leave out what follows")
        return Rule(
            text=self._text.strip(),
            figure=figure,
            device=device,
            comparison=comparison,
            amount=amount.value,
            share=amount.share,
            said=amount.said,
            growth=growth,
            hold=hold,
            level=level or "warning",
        )

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        self._at += token.kind != "end"
        return token

    def _took_word(self, *words: str) -> bool:
        found = self._next.kind == "word" and self._next.text in words
        self._at += found
        return found

    def _took_sign(self, sign: str) -> bool:
        found = self._next.kind == "sign" and self._next.text == sign
        self._at += found
        return found

    def _error(self, remedy: str, token: _Token | None = None) -> ConfigurationError:
        return _error(self._text, (token or self._next).start, remedy)

    def _level_before(self) -> Level | None:
        if len(self._tokens) > 1 and self._tokens[1].text == ":":
            level = self._level()
            self._take()
            return level
        return None

    def _level_after(self, before: Level | None) -> Level | None:
        here = self._next
        if not self._took_word("as"):
            return before
        if before is not None:
            raise self._error("the level is said twice: leave one out", here)
        return self._level()

    def _level(self) -> Level:
        for level in _LEVELS:
            if self._took_word(level):
                return level
        raise self._error("a level is info, warning or error")

    def _figure(self) -> tuple[str, str | None]:
        token = self._next
        owner, _, measure = token.text.partition(".")
        if token.kind == "word" and token.text in _FIGURES:
            self._take()
            return token.text, None
        is_device = _DEVICE.fullmatch(owner) is not None and not owner.startswith("gpu")
        if token.kind == "word" and is_device and measure in DEVICE_MEASURES:
            self._take()
            return f"device.{measure}", owner
        raise self._error(_unknown_figure(token.text))

    def _comparison(self, *, upward_only: bool) -> Comparison:
        token = self._next
        for comparison in _COMPARISONS:
            if token.text == comparison and (comparison[0] == ">" or not upward_only):
                self._take()
                return comparison
        if upward_only:
            raise self._error("after 'grows' write > or >=")
        raise self._error("write >, >=, < or <=, or 'grows >'")

    def _amount(self, figure: str) -> _Amount:
        token = self._next
        plain = figure == "device.fragmentation"
        example = "a number such as 0.4 or 40%" if plain else "a size such as 32 GiB, or 80%"
        if token.kind != "number":
            raise self._error(f"write {example}")
        value = float(self._take().text)
        unit = self._next
        if self._took_sign("%"):
            if value > 100:  # noqa: PLR2004 - per cent
                raise self._error("a share is at most 100%", token)
            return _Amount(value / 100, not plain, f"{token.text}%")
        if plain:
            if value > 1:
                raise self._error("fragmentation is between 0 and 1: write 0.4 or 40%", token)
            return _Amount(value, share=False, said=token.text)
        if unit.kind != "word" or unit.text.lower() not in _SIZES:
            raise self._error(f"write the unit here: {_SIZE_NAMES}, or %")
        self._take()
        size = value * _SIZES[unit.text.lower()]
        if not size < _LARGEST_SIZE:
            raise self._error("no machine has so much memory: write a smaller size", token)
        return _Amount(size, share=False, said=f"{token.text} {unit.text}")

    def _growth(self, figure: str) -> Growth:
        if not self._took_sign("/"):
            raise self._error("say how fast: /epoch, /step or /100 steps")
        every = self._count() if self._next.kind == "number" else 1
        axis = self._next
        if self._took_word("epoch", "epochs"):
            if figure in SAMPLED_FIGURES:
                raise self._error(f"{figure} is known by steps only: write /100 steps", axis)
            return Growth(every, "epoch")
        if self._took_word("step", "steps"):
            return Growth(every, "step")
        raise self._error("write epoch or step")

    def _hold(self, axis: GrowthAxis) -> int:
        if not self._took_word("for"):
            return 1
        count = self._count()
        if not self._took_word(axis, f"{axis}s"):
            raise self._error(f"write {axis}s: that is what this rule is judged by")
        return count

    def _count(self) -> int:
        token = self._next
        digits = token.text.lstrip("0")
        whole = token.kind == "number" and digits.isdecimal() and len(digits) <= len(str(MAX_COUNT))
        if not whole or int(digits) > MAX_COUNT:
            raise self._error("write a whole number from 1 up")
        self._take()
        return int(digits)


def _unknown_figure(name: str) -> str:
    owner, _, measure = name.partition(".")
    if owner.startswith("gpu") and measure in DEVICE_MEASURES:
        return f"write device.{measure} for any device, or cuda0.{measure} for one"
    close = difflib.get_close_matches(name, _FIGURES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}there are {', '.join(_FIGURES)}; one device is cuda0.allocated"


def _error(text: str, place: int, remedy: str) -> ConfigurationError:
    # What can't be printed keeps its width, so that the caret stays under the place.
    shown = "".join(" " if c.isspace() else c if c.isprintable() else "?" for c in text)
    return ConfigurationError(f"an alert rule can't be read: {remedy}\n  {shown}\n  {' ' * place}^")
