"""Writing lines to the standard streams, which may be missing, or unable to show some sign of a line."""

from __future__ import annotations

import sys
from typing import TextIO


def out(text: str) -> None:
    """Writes lines to the standard output."""
    _write(sys.stdout, text)


def err(text: str) -> None:
    """Writes lines to the standard error."""
    _write(sys.stderr, text)


def say(message: str) -> None:
    """Tells the user something on the standard error, in one line that says who speaks."""
    err(f"memlog: {message}")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # a program without a terminal has none
        return
    try:
        stream.write(f"{text}\n")
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(f"{text}\n".encode(encoding, "replace").decode(encoding))
