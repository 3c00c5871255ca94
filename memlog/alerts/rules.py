"""Alert rules as text, short enough for one line of a YAML file, and the text of an alert about a rule.

::

    [LEVEL:] FIGURE COMPARISON AMOUNT [for N steps] [as LEVEL]
    [LEVEL:] FIGURE grows >|>= AMOUNT/[N] epoch|step [for N epochs|steps] [as LEVEL]

    FIGURE      host.rss  host.tree  …             (`HOST_FIGURES`)
                device.allocated  device.reserved  device.peak  device.fragmentation   (any device)
                cuda0.allocated …                                                      (one device)
    COMPARISON  >  >=  <  <=
    AMOUNT      32 GiB   80%   0.4 (only for fragmentation)
    LEVEL       info  warning  error   (default: warning)

Growth must last (see `memlog.growth`). memlog judges growth over a number of steps or epochs: the larger
of the numbers after ``/`` and ``for``, but at least 20 steps or three epochs.

Sizes are written in B, KiB, MiB, GiB or TiB. KB means KiB, MB means MiB, and so on: everywhere in memlog
"MB" is 1024² bytes. For a figure of the host, ``%`` refers to the machine's memory or the limit of the
process's control groups, whichever is smaller. For a figure of a device, ``%`` refers to the device's
capacity. For fragmentation, ``40%`` means 0.4.

In a YAML file, an unquoted rule that begins with a level, such as ``error:``, is a mapping and not text. To
avoid this, quote the rule, or write the level at the rule's end: ``as error``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from memlog._internal.terminal import format_bytes
from memlog._internal.text_parser import DEVICE_MEASURES, ComparisonSign, Reader, Token
from memlog.events import HOST_RSS, SAMPLED

Level: TypeAlias = Literal["info", "warning", "error"]
GrowthAxis: TypeAlias = Literal["epoch", "step"]

SAMPLED_FIGURES = tuple(name for name, kind in SAMPLED.items() if kind.in_rules)
"""Figures that the helper process reads about once a second, or more often if the steps are fast."""
HOST_FIGURES = (HOST_RSS, *SAMPLED_FIGURES)

MAX_COUNT = 10**9
"""Maximum number of steps or epochs that a rule may name."""

_LEVELS: tuple[Level, ...] = get_args(Level)
_FIGURES = (*HOST_FIGURES, *(f"device.{measure}" for measure in DEVICE_MEASURES))
_THERE_ARE = f"there are {', '.join(_FIGURES)}; for one device, write cuda0.allocated"


class GrowthPeriod(msgspec.Struct, frozen=True):
    """Number of epochs or steps over which a ``grows`` rule measures growth."""

    every: int
    axis: GrowthAxis

    def __str__(self) -> str:
        """Return the period as text, such as ``epoch`` or ``100 steps``."""
        return self.axis if self.every == 1 else f"{self.every} {self.axis}s"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed rule."""

    text: str
    """The rule as the user wrote it."""
    figure: str
    """One of `HOST_FIGURES`, or ``device.`` and one of `DEVICE_MEASURES`."""
    device: str | None = None
    """The rule's device; ``None``: any device."""
    comparison: ComparisonSign
    amount: float
    """Threshold in bytes; if `share` is true, a fraction of the limit (0 to 1); for fragmentation, a number
    from 0 to 1."""
    share: bool = False
    """True if ``amount`` is a fraction of the limit."""
    amount_text: str
    """The amount as the user wrote it, such as ``32 GiB``."""
    growth: GrowthPeriod | None = None
    """The period of a ``grows`` rule; ``None``: the rule compares values, not their growth."""
    hold: int = 1
    """Number of steps for which the condition has to hold; if the rule judges growth per epoch, number of
    epochs."""
    level: Level = "warning"

    @property
    def sampled(self) -> bool:
        """True if the helper process judges the rule."""
        return self.figure in SAMPLED_FIGURES

    @property
    def attribute(self) -> str:
        """Last part of the figure's name, such as ``rss`` or ``allocated``."""
        return self.figure.partition(".")[2]

    @property
    def upward(self) -> bool:
        """True if the rule warns of high values."""
        return self.comparison in (">", ">=")

    @property
    def held_axis(self) -> GrowthAxis:
        """Unit of ``hold``: ``step`` or ``epoch``."""
        return "step" if self.growth is None else self.growth.axis


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Parse several rules. If a text occurs twice, it gives only one rule.

    Raises:
        ConfigurationError: see `parse_rule`.
    """
    return tuple(parse_rule(text) for text in dict.fromkeys(texts))


def parse_rule(text: str) -> Rule:
    """Parse a rule.

    Raises:
        ConfigurationError: the text is not a rule. The message has three lines: the remedy, the rule, and a
            caret under the mistake.
    """
    return _Parser(text, "an alert rule").rule()


class _Amount(NamedTuple):
    value: float
    share: bool
    text: str


class _Parser(Reader):
    def rule(self) -> Rule:
        level = self._level_before()
        figure, device = self._figure()
        grows = self.took_word("grows")
        comparison = self._comparison(upward_only=grows)
        amount = self._amount(figure)
        growth = self._growth(figure) if grows else None
        hold = self._hold("step" if growth is None else growth.axis)
        level = self._level_after(level)
        self.end("rule")
        return Rule(
            text=self._text.strip(),
            figure=figure,
            device=device,
            comparison=comparison,
            amount=amount.value,
            share=amount.share,
            amount_text=amount.text,
            growth=growth,
            hold=hold,
            level=level or "warning",
        )

    def _level_before(self) -> Level | None:
        self.refuse_torchs_name()
        if self.after_next == ":":
            level = self._level()
            self.take()
            return level
        return None

    def _level_after(self, before: Level | None) -> Level | None:
        here = self.next
        if not self.took_word("as"):
            return before
        if before is not None:
            raise self.error("the level is given twice: remove one", here)
        return self._level()

    def _level(self) -> Level:
        for level in _LEVELS:
            if self.took_word(level):
                return level
        small = self.next.text.lower()
        if small in _LEVELS:
            raise self.error(f"levels are in small letters: write {small}")
        raise self.error("a level is info, warning or error")

    def _figure(self) -> tuple[str, str | None]:
        token = self.next
        if self.took_word(*_FIGURES):
            return token.text, None
        self.refuse_torchs_name()  # `_level_before` did not check the word after a level
        named = self.device()
        if named is not None:
            device, measure = named
            return f"device.{measure}", device
        raise self.error(_unknown_figure(token))

    def _comparison(self, *, upward_only: bool) -> ComparisonSign:
        if upward_only and not self.next.text.startswith(">"):
            raise self.error("after 'grows' write > or >=")
        comparison = self.comparison()
        if comparison is None:
            raise self.error("write >, >=, < or <=, or 'grows >'")
        return comparison

    def _amount(self, figure: str) -> _Amount:
        token = self.next
        plain = figure == "device.fragmentation"
        example = "a number such as 0.4 or 40%" if plain else "a size such as 32 GiB, or 80%"
        if token.kind != "number":
            raise self.error(f"write {example}")
        value = float(self.take().text)
        unit = self.next
        if self.took_sign("%"):
            if value > 100:  # noqa: PLR2004 - per cent
                raise self.error("a share is at most 100%", token)
            return _Amount(value / 100, not plain, f"{token.text}%")
        if plain:
            if value > 1:
                raise self.error("fragmentation is between 0 and 1: write 0.4 or 40%", token)
            return _Amount(value, share=False, text=token.text)
        size = self.size(token)
        return _Amount(size, share=False, text=f"{token.text} {unit.text}")

    def _growth(self, figure: str) -> GrowthPeriod:
        if not self.took_sign("/"):
            raise self.error("write how fast: /epoch, /step or /100 steps")
        every = self._count() if self.next.kind == "number" else 1
        axis = self.next
        if self.took_word("epoch", "epochs"):
            if figure in SAMPLED_FIGURES:
                raise self.error(f"{figure} is not measured by epoch: write /100 steps", axis)
            return GrowthPeriod(every, "epoch")
        if self.took_word("step", "steps"):
            return GrowthPeriod(every, "step")
        raise self.error("write epoch or step")

    def _hold(self, axis: GrowthAxis) -> int:
        if not self.took_word("for"):
            return 1
        count = self._count()
        if not self.took_word(axis, f"{axis}s"):
            raise self.error(f"write {axis}s: this rule is judged by {axis}s")
        return count

    def _count(self) -> int:
        token = self.next
        digits = token.text.lstrip("0")
        whole = token.kind == "number" and digits.isdecimal() and len(digits) <= len(str(MAX_COUNT))
        if not whole or int(digits) > MAX_COUNT:
            raise self.error("write a whole number from 1 up")
        self.take()
        return int(digits)


def _unknown_figure(token: Token) -> str:
    name, small = token.text, token.text.lower()
    owner, _, measure = name.partition(".")
    if token.kind == "end":
        return f"the rule is empty: begin with a figure; {_THERE_ARE}"
    if small in _LEVELS:
        return f"put a colon behind the level, as in '{small}: host.rss > 80%'"
    if small in _FIGURES:
        return f"figures are in small letters: write {small}"
    if owner.startswith("gpu") and measure in DEVICE_MEASURES:
        return f"write device.{measure} for any device, or cuda0.{measure} for one"
    # A measure without its owner ("rss", "peak") means the host's or any device's.
    whole = [figure for figure in _FIGURES if figure.endswith(f".{small}")]
    close = whole or difflib.get_close_matches(small, _FIGURES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{name!r} is not a figure: {hint}{_THERE_ARE}"


_COMPARISONS = {">": "over", ">=": "at least", "<": "under", "<=": "at most"}


def alert_title(rule: Rule, subject: str, value: float, limit: int | None) -> str:
    """Return one line, such as "host.rss is 314.7 MiB, over 300 MiB for 5 steps".

    ``limit`` is the number of bytes to which ``%`` in the rule refers. It may be ``None`` if the rule's
    amount has no ``%``.
    """
    verb = "is" if rule.growth is None else "grows"
    shown = f"{value:.2f}" if rule.figure == "device.fragmentation" else format_bytes(value)
    per = "" if rule.growth is None else f" per {rule.growth}"
    amount = rule.amount_text + (f" of {format_bytes(limit)}" if rule.share else "")
    held = f" for {rule.hold} {rule.held_axis}s" if rule.hold > 1 else ""
    comparison = _COMPARISONS[rule.comparison]
    return f"{subject}.{rule.attribute} {verb} {shown}{per}, {comparison} {amount}{held}"
