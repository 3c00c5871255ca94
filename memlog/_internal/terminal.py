"""Writing lines to the standard streams, which may be missing, or unable to show some sign of a line."""

from __future__ import annotations

import sys
from typing import TextIO

from memlog._internal.signals import raised_by_handler


def out(text: str) -> None:
    """Writes lines to the standard output.

    Raises:
        Exception: whatever the stream raises: it may be closed, full, or of the user's own making.
    """
    _write(sys.stdout, text)


def err(text: str) -> None:
    """Writes lines to the standard error.

    Raises:
        Exception: whatever the stream raises.
    """
    _write(sys.stderr, text)


def say(message: str) -> None:
    """Tells the user something on the standard error, in one line that says who speaks.

    Never raises, but for what a signal handler of the user's raised meanwhile: where the stream is broken
    there is nobody to tell.
    """
    try:
        err(f"memlog: {message}")
    except Exception as error:
        if raised_by_handler(error):
            raise


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # a program without a terminal has none
        return
    try:
        stream.write(f"{text}\n")
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(f"{text}\n".encode(encoding, "replace").decode(encoding))
