"""Parser for short expressions of words, numbers and sizes. Its errors show a caret under the user's mistake.

Alert rules (``host.rss > 80%``) and comparison gates (``device.peak > +5%``) use this parser.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias, get_args

from memlog.errors import ConfigurationError

ComparisonSign: TypeAlias = Literal[">", ">=", "<", "<="]

DEVICE_MEASURES = ("allocated", "reserved", "peak", "fragmentation")
SIZE_NAMES = "B, KiB, MiB, GiB or TiB"
"""Units of sizes. KB means KiB, MB means MiB, and so on: everywhere in memlog "MB" is 1024² bytes."""

_COMPARISONS: tuple[ComparisonSign, ...] = get_args(ComparisonSign)
_SIZES: dict[str, int] = {"b": 1} | {
    unit: 1024**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit in (f"{prefix}b", f"{prefix}ib")
}
_LARGEST_SIZE = 2**63
_DEVICE = re.compile(r"[a-z]+[0-9]+", re.ASCII)
_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_.]*)"
    r"|(?P<sign>[<>]=?|.)",
    re.ASCII | re.DOTALL,
)


class Token(NamedTuple):
    """A word, number or sign of the text."""

    kind: str
    """``number``, ``word``, ``sign`` or ``end``."""
    text: str
    start: int


class Reader:
    """Reader of one text, from left to right.

    ``what`` is the kind of the text with its article, such as "an alert rule". Every error message begins
    with ``what``. The message has three lines: the remedy, the text, and a caret under the mistake.
    """

    def __init__(self, text: str, what: str) -> None:
        self._what = what
        self._text = text
        self._tokens = [
            Token(str(match.lastgroup), match.group(), match.start())
            for match in _TOKEN.finditer(self._text)
            if not match.group().isspace()
        ]
        self._tokens.append(Token("end", "", len(self._text.rstrip())))
        self._at = 0

    @property
    def next(self) -> Token:
        """The next token, which is not consumed."""
        return self._tokens[self._at]

    @property
    def after_next(self) -> str:
        """Text of the token after `next`."""
        return self._tokens[min(self._at + 1, len(self._tokens) - 1)].text

    def take(self) -> Token:
        """Consume and return the next token."""
        token = self.next
        self._at += token.kind != "end"
        return token

    def took_word(self, *words: str) -> bool:
        """Consume the next token if it is one of these words. Return True if it was consumed."""
        found = self.next.kind == "word" and self.next.text in words
        self._at += found
        return found

    def took_sign(self, sign: str) -> bool:
        """Consume the next token if it is this sign. Return True if it was consumed."""
        found = self.next.kind == "sign" and self.next.text == sign
        self._at += found
        return found

    def error(self, remedy: str, token: Token | None = None) -> ConfigurationError:
        """Return an error to raise, with a caret under ``token`` (by default the next token)."""
        # Each unprintable character becomes one character, so that the caret stays under the mistake.
        shown = "".join(" " if c.isspace() else c if c.isprintable() else "?" for c in self._text)
        place = (token or self.next).start
        return ConfigurationError(
            f"{self._what} can't be read: {remedy}\n  {shown}\n  {' ' * place}^"
        )

    def comparison(self) -> ComparisonSign | None:
        """Consume and return a comparison sign; ``None`` if the next token is no comparison sign."""
        for comparison in _COMPARISONS:
            if self.took_sign(comparison):
                return comparison
        return None

    def device(self) -> tuple[str, str] | None:
        """Consume a measure of one device, such as ``cuda0.peak``, and return the device and the measure.

        Return ``None`` if the next token is no such measure.
        """
        owner, _, measure = self.next.text.partition(".")
        is_device = _DEVICE.fullmatch(owner) is not None and not owner.startswith("gpu")
        if self.next.kind != "word" or not is_device or measure not in DEVICE_MEASURES:
            return None
        self.take()
        return owner, measure

    def refuse_torchs_name(self) -> None:
        """Raise an error if a device is spelt as in torch, ``cuda:0.peak``.

        memlog's spelling is ``cuda0.peak``, because in an alert rule a colon ends the alert's level.
        """
        owner, colon, number, dot, measure = (
            self._tokens[min(self._at + ahead, len(self._tokens) - 1)] for ahead in range(5)
        )
        if (owner.kind, colon.text, dot.text) != ("word", ":", ".") or not number.text.isdecimal():
            return
        if measure.text in DEVICE_MEASURES:
            name = "cuda" if owner.text.lower() == "gpu" else owner.text.lower()
            raise self.error(f"write {name}{number.text}.{measure.text}")

    def size(self, number: Token) -> float:
        """Consume a unit, and return the bytes of ``number`` units. ``number`` is consumed already."""
        unit = self.next
        if unit.kind != "word" or unit.text.lower() not in _SIZES:
            raise self.error(f"write the unit here: {SIZE_NAMES}, or %")
        self.take()
        size = float(number.text) * _SIZES[unit.text.lower()]
        if not size < _LARGEST_SIZE:
            raise self.error("no machine has so much memory: write a smaller size", number)
        return size

    def end(self, what: str) -> None:
        """Raise an error if more text follows. The error calls the parsed text ``what``, such as "rule"."""
        if self.next.kind != "end":
            raise self.error(f"the {what} ends here: remove the rest")


def read_size(size: str | int) -> int:
    """Return a size in bytes, from a number of bytes or from text such as ``"80 GiB"``.

    Raises:
        ConfigurationError: The text can't be read.
    """
    if isinstance(size, int):
        return size
    reader = Reader(size, "a size")
    number = reader.take()
    if number.kind != "number":
        raise reader.error("write a size such as 80 GiB", number)
    size_bytes = reader.size(number)
    if reader.next.kind != "end":
        raise reader.error("write nothing behind the size")
    return int(size_bytes)
