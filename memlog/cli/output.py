"""What the commands' output has in common: a terminal's page or a pipe's plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memlog.reports.schema import RunStatus

STATUS_STYLES: dict[RunStatus, str] = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "killed": "red",
}

_PIPE_WIDTH = 100_000
"""Columns where nobody looks at lines but programs: nothing is wrapped or cut."""
_SMALL = 100
"""Below it, four digits say more than one decimal."""
_MINUTE = 60
_HOUR = 3600


@contextmanager
def page() -> Iterator[Console]:
    """A console for standard output; into a pipe it prints when all is said."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        yield console
        return
    console.width = _PIPE_WIDTH
    with console.capture() as capture:
        yield console
    # Tables fill their last column with blanks, which is of no use to a program.
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


def table(console: Console) -> Table:
    """A table without frames."""
    if not console.is_terminal:
        return Table(box=None, pad_edge=False)
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        header_style="dim",
        border_style="dim",
    )


def number(value: float) -> str:
    """A number for a person: ``"1,234.5"``, ``"0.00412"``, ``"2"``."""
    return f"{value:,.1f}" if abs(value) >= _SMALL else f"{value:.4g}"


def plain(text: object, style: str = "") -> Text:
    """``text`` as it is: a journal is anybody's file, and must not steer the terminal."""
    return Text(one_line(str(text)), style)


def one_line(text: str) -> str:
    """``text`` on one line, and without what would steer a terminal."""
    joined = " ".join(text.splitlines())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in joined)


def print_json(document: bytes) -> None:
    """Writes a document for programs, as UTF-8 whatever the terminal's encoding is."""
    click.echo(document)


def sign(console: Console, symbol: str, word: str) -> str:
    """``symbol``, or ``word`` where the output can't show it."""
    try:
        symbol.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return word
    return symbol


def local_time(iso: str | None) -> str:
    """A document's time on this machine's clock; ``"unknown"`` for ``None``."""
    if iso is None:
        return "unknown"
    # fromisoformat() takes a "Z" from Python 3.11 on only.
    moment = datetime.fromisoformat(iso.replace("Z", "+00:00"))
    try:
        return moment.astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return iso  # a damaged journal's year 9999


def duration(seconds: float | None) -> str:
    """A span for a person: ``"8.3 s"``, ``"12 min 5 s"``, ``"3 h 4 min"``, ``"unknown"``."""
    if seconds is None:
        return "unknown"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR:,} h {whole % _HOUR // _MINUTE} min"
