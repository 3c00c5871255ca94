"""Writing to the standard streams, which may be missing or unable to encode a character."""

from __future__ import annotations

import sys
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
        encoding = stream.encoding or "ascii"
        stream.write(f"{text}\n".encode(encoding, "replace").decode(encoding))
