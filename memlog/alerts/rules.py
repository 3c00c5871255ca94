"""Alert rules as text, short enough for one line of a YAML file, and the decision whether a rule fires.

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

A level is the value of a rule's figure at a step or epoch, such as the bytes of ``host.rss`` at step 120.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from memlog._internal.terminal import format_bytes
from memlog._internal.text_parser import DEVICE_MEASURES, ComparisonSign, Reader, Token
from memlog.events import HOST_RSS, SAMPLED
from memlog.growth import FEW, JOINED, MAX_LEVELS, LevelScales, LevelWindow, keeps_growing, trend

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
        found = self.device()
        if found is not None:
            device, measure = found
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


LEAST_STEPS = 20
"""Growth is judged over at least this many steps, even if the rule names fewer. Over fewer steps, growth in
warm-up would raise an alarm."""
LEAST_EPOCHS = 3
_LONGER = 2
"""Number of windows that are longer than the rule needs. Longer windows also show growth in large, rare jumps
and growth with much noise."""
_LOOKS = 8
"""After judging N levels of a window, memlog waits for N / `_LOOKS` new levels before it judges the window
again."""
_OVER = 0.5
"""Growth below this fraction of a rule's threshold counts as no growth."""
_GARBAGE = 0.25
"""If a garbage collection frees less than this fraction of the growth, memlog reports the whole growth.
Otherwise memlog subtracts the freed bytes."""
_LARGER = 2
"""If growth gets faster by this factor after an alarm, memlog raises another alarm, even in the cooldown."""


class _Look(NamedTuple):
    """Growth of the newest levels in one window of a `GrowthMeter`."""

    pace: float
    """Growth per epoch or step."""
    level: float
    """Level at the window's end, in bytes or as a ratio."""
    span: float
    """Epochs or steps that the window covers."""
    lasts: bool
    """True if the level grew throughout the window, and at least as fast as the rule requires."""


_NOTHING = _Look(0.0, 0.0, 0.0, lasts=False)


class _Alarm(NamedTuple):
    """Growth that raised an alarm."""

    pace: float
    window: int
    """Index of the window that showed the growth; 0 is the shortest window."""
    time_us: int


class GrowthMeter:
    """State of one rule for the levels of the host or of one device.

    Windows of several lengths hold the levels. The number of levels in each window is bounded. A window is
    judged when the window covers enough steps or epochs for the rule. All windows are cleared after an alarm
    and when growth ends, so the next alarm is about later growth.

    ``threshold`` is the growth that raises an alarm, in the unit of the levels. The cooldown is the time of
    ``cooldown_us`` microseconds after an alarm. During the cooldown, only growth that is much faster or
    reaches a clearly higher level raises another alarm.
    """

    def __init__(self, rule: Rule, threshold: float, cooldown_us: int) -> None:
        self._every = every = 1 if rule.growth is None else rule.growth.every
        self._wanted = threshold / self._every
        self._inclusive = rule.comparison == ">="
        self._cooldown_us = cooldown_us
        self._axis = rule.held_axis
        if self._axis == "epoch":
            # `for N epochs` means N rises, which lie between N + 1 epochs.
            self._reach = max(every, LEAST_EPOCHS, rule.hold + 1)
        else:
            self._reach = max(every, LEAST_STEPS, rule.hold)
        needed = 1
        while MAX_LEVELS * JOINED ** (needed - 1) < self._reach:
            needed += 1
        self._levels = LevelScales(needed + _LONGER)
        self._first: int | None = None
        self._last = 0
        self._before = 0.0
        self._alarm: _Alarm | None = None
        self._active = False
        self._highest = 0.0
        self._alarm_before: _Alarm | None = None
        self._span = 0.0
        self._collected: tuple[int, int] | None = None
        self.judged = False
        """True as soon as a window has been judged."""

    def take(self, level: float, index: int, time_us: int) -> float | None:
        """Judge the level at the epoch or step ``index``. Return ``None`` if the level raises no alarm.

        If the level raises an alarm, return the growth over the rule's number of epochs or steps.
        ``time_us`` is the event's Unix time in microseconds.
        """
        if self._first is None:
            self._first = index
        elif index == self._last:  # the helper process may sample several times within one step
            self._levels.finest.lower(level)
            return None
        elif index < self._last:
            self._levels.clear()
        if self._active:  # a level counts as reached if two consecutive readings show it
            self._highest = max(self._highest, min(level, self._before))
        self._last, self._before = index, level
        for number, window in enumerate(self._levels.add(index, level)):
            look = self._look(window, LEAST_STEPS if number else min(FEW, self._reach))
            if look is not None:
                self.judged = True
                if self._is_news(look, number, time_us):
                    return look.pace * self._every
        return None

    def without_garbage(self, freed: int, left: int) -> float | None:
        """Return the last alarm's growth without garbage, over the rule's number of epochs or steps.

        A garbage collection has just freed ``freed`` bytes. Now ``left`` bytes are in use. If the growth
        without garbage is too small for an alarm, withdraw the alarm and return ``None``.

        The freed garbage can be older than the growth. Subtracting old garbage could hide a leak. So the
        result of a subtraction is at least the growth since the previous garbage collection.
        """
        before, self._collected = self._collected, (self._last, left)
        pace = 0.0 if self._alarm is None else self._alarm.pace
        if freed < _GARBAGE * pace * self._span:
            return pace * self._every
        pace -= freed / self._span
        if before is not None and before[0] < self._last:
            pace = max(pace, (left - before[1]) / (self._last - before[0]))
        if pace < self._wanted or (pace == self._wanted and not self._inclusive):
            self._alarm, self._active = self._alarm_before, False
            return None
        return pace * self._every

    def why_not_judged(self) -> str:
        """Return the reason why the rule was never judged: too few steps or epochs, or too few readings."""
        seen = 0 if self._first is None else self._last - self._first + 1
        least = f"fewer than {self._reach} {self._axis}s came"
        return least if seen < self._reach else f"it was read fewer than {FEW} times"

    def _is_news(self, look: _Look, window: int, time_us: int) -> bool:
        alarm = self._alarm
        if self._active and alarm is not None:
            if window == alarm.window and look.pace < _OVER * self._wanted:
                self._active = False
                self._levels.clear()
                return False
            if look.pace < _LARGER * alarm.pace:
                return False
        if not look.lasts or (look.pace == self._wanted and not self._inclusive):
            return False
        if alarm is not None and not self._active and not self._is_another(look, alarm, time_us):
            return False
        self._alarm_before, self._alarm = alarm, _Alarm(look.pace, window, time_us)
        self._span = look.span
        self._active = True
        self._highest = look.level
        self._levels.clear()
        return True

    def _is_another(self, look: _Look, alarm: _Alarm, time_us: int) -> bool:
        """Return True if ``look`` is reason enough for another alarm after ``alarm``.

        One of these is enough: the cooldown is over, the level is clearly above the highest level of the
        earlier growth, or the growth is much faster than the earlier growth.
        """
        cooled = not 0 <= time_us - alarm.time_us < self._cooldown_us
        higher = look.level > self._highest + _OVER * self._wanted * look.span
        return cooled or higher or look.pace >= _LARGER * alarm.pace

    def _look(self, window: LevelWindow, least: int) -> _Look | None:
        """Judge a window's newest levels.

        Return ``None`` if the window has too few levels, or too few new levels since the last judgement.
        ``least`` is the minimum number of levels.

        If no alarm is active and the level hardly rose, report no growth without the slow, full judgement.
        """
        held = len(window.levels)
        if held < least:
            return None
        spacing = (window.indexes[-1] - window.indexes[0]) / (held - 1)
        count = max(least, int(self._reach / spacing))
        if held < count or window.unseen < count // _LOOKS:
            return None
        window.unseen = 0
        span = count * spacing
        rise = window.levels[-1] - window.levels[-count]
        if not self._active and rise < _OVER * self._wanted * span:
            return _NOTHING
        levels = list(islice(window.levels, held - count, None))
        found = trend(levels)
        wanted = self._wanted * spacing
        lasts = found.pace >= wanted and keeps_growing(levels, wanted)
        return _Look(found.pace / spacing, found.level, span, lasts)


HYSTERESIS = 0.05
"""Fraction of the threshold. Before a rule can fire again, a value must lie on the harmless side of the
threshold, at least this fraction away from the threshold."""


class Trigger:
    """State of one rule for the values of the host or of one device.

    The rule fires at the first value beyond the threshold. If ``rule.hold`` is N > 1, the rule fires when the
    values have been beyond the threshold for N steps. ``threshold`` is in the values' unit.

    Two things must happen before the rule fires again. A value returns to the harmless side of the threshold
    (`HYSTERESIS`). The events' timestamps advance by ``cooldown_us`` microseconds.
    """

    def __init__(self, rule: Rule, threshold: float, cooldown_us: int) -> None:
        # A rule that warns of low values is judged with all signs changed.
        self._sign = 1 if rule.upward else -1
        self._line = self._sign * threshold
        self._rearm = self._line - HYSTERESIS * abs(threshold)
        self._inclusive = rule.comparison in (">=", "<=")
        self._hold = rule.hold
        self._cooldown_us = cooldown_us
        self._armed = True
        self._since: int | None = None
        self._fired_us: int | None = None

    def fires(self, value: float, index: int | None, time_us: int) -> bool:
        """Take the next value; return whether it raises an alert.

        ``index`` is the value's step; ``None``: the value belongs to no step. ``time_us`` is the event's Unix
        time in microseconds.
        """
        value *= self._sign
        if value < self._line or (value == self._line and not self._inclusive):
            self._since = None
            self._armed = self._armed or value <= self._rearm
            return False
        if not self._armed or (self._hold > 1 and not self._has_held(index)):
            return False
        if self._fired_us is not None and 0 <= time_us - self._fired_us < self._cooldown_us:
            return False
        self._armed = False
        self._fired_us = time_us
        return True

    def _has_held(self, index: int | None) -> bool:
        if index is None:
            return False
        if self._since is None or index < self._since:
            self._since = index
        return index - self._since + 1 >= self._hold
