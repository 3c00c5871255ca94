"""Text for people: writing to the standard streams, bytes and durations, names of source files.

Everywhere in memlog "MB" and "MiB" mean 1024² bytes, as in the tools that memlog replaces. Names of metrics
use ``mib``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from memlog._internal.signals import raised_by_handler


def out(text: str) -> None:
    """Write lines to standard output, without control characters.

    Raises:
        Exception: any error of the stream, which may be closed, full, or replaced by the user.
    """
    _write(sys.stdout, text)


def err(text: str) -> None:
    """Write lines to standard error, without control characters; otherwise like `out`."""
    _write(sys.stderr, text)


def one_line(text: str) -> str:
    """Return ``text`` on one line, without control characters. A tab becomes a space."""
    joined = " ".join(text.splitlines()).replace("\t", " ")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in joined)


def lines(text: str) -> str:
    """Return ``text`` without control characters except line feeds."""
    return "\n".join(map(one_line, text.split("\n")))


def say(message: str) -> None:
    """Print a message on standard error, on one line that begins with ``memlog:``.

    The message may contain any text, such as the name of a phase.

    Errors of the stream are ignored, because no other place exists to report them. Exceptions of the user's
    signal handlers are raised.
    """
    try:
        err(f"memlog: {one_line(message)}")
    except Exception as error:
        if raised_by_handler(error):
            raise


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # a program without a terminal may have no stream
        return
    text = lines(text)
    try:
        stream.write(f"{text}\n")
    except UnicodeEncodeError:
        # The stream's encoding lacks a character. A question mark takes its place.
        encoding = stream.encoding or "ascii"
        stream.write(f"{text}\n".encode(encoding, "replace").decode(encoding))


def source_name(file: str) -> str:
    """Return a source file's name without the folder. For a notebook's cell, return text like ``cell In[3]``.

    IPython gives a cell a file name made of numbers, which tells a reader nothing.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # IPython 7 has no such method.
    format_code_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if format_code_name is None else format_code_name(file)
    return Path(file).name if cell is None else f"cell {cell[1]}"


MIB = 1024**2

_MINUTE = 60
_SMALL = 100
"""Least number that is shown with one decimal. Smaller numbers are shown with four significant digits."""
_HOUR = 60 * _MINUTE
_STEP = 1024.0
_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def mib(size: int | None) -> float | None:
    """Convert bytes to MiB; ``None`` (unknown) stays ``None``."""
    return None if size is None else size / MIB


def format_bytes(size: float | None) -> str:
    """Return a size as text: ``"1.5 GiB"``, ``"512 B"``, ``"unknown"`` for ``None``."""
    if size is None:
        return "unknown"
    scaled = float(size)
    for suffix in _SUFFIXES:
        if abs(scaled) < _STEP or suffix == _SUFFIXES[-1]:
            break
        scaled /= _STEP
    return f"{scaled:.0f} B" if suffix == "B" else f"{scaled:.1f} {suffix}"


def format_duration(seconds: float | None) -> str:
    """Return a duration as text: ``"8.3 s"``, ``"12 min 5 s"``, ``"3 h 4 min"``, ``"unknown"``."""
    if seconds is None:
        return "unknown"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR:,} h {whole % _HOUR // _MINUTE} min"


def format_number(value: float) -> str:
    """Return a number as text: ``"1,234.5"``, ``"0.00412"``, ``"2"``."""
    return f"{value:,.1f}" if abs(value) >= _SMALL else f"{value:.4g}"
