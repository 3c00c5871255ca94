"""Read the trainer's messages from a pipe."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator

from memlog.delivery.helper import protocol

TERM_GRACE = 20.0
"""Maximum seconds that the helper goes on after SIGTERM. Schedulers send SIGKILL about 30 s after SIGTERM."""


class LineReader:
    """Reader of whole lines from a pipe, with a time limit."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unfinished = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(fd, selectors.EVENT_READ)
        self.open = True

    def read(self, timeout: float | None) -> Iterator[bytes]:
        """Wait at most ``timeout`` seconds for data, and yield the complete lines in it.

        Without a timeout, wait until data arrives or the pipe closes.
        """
        if not self._selector.select(timeout):
            return
        data = os.read(self._fd, 65536)
        if not data:
            self.open = False
            self._selector.unregister(self._fd)
            return
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        yield from lines


class NoMessages:
    """Replacement of `LineReader` for the run of another rank, whose trainer sends no messages."""

    open = True

    def read(self, timeout: float) -> Iterator[bytes]:
        time.sleep(timeout)
        yield from ()


class StopTime:
    """Time at which the helper process has to end: `TERM_GRACE` seconds after SIGTERM.

    The helper does not end at once, because the trainer gets SIGTERM too, and may first save its work.
    """

    at: float | None = None

    def set(self, *_: object) -> None:
        """Handle SIGTERM. Only the first signal sets the time."""
        if self.at is None:
            self.at = time.monotonic() + TERM_GRACE

    @property
    def has_come(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at


def first_message(lines: LineReader) -> tuple[protocol.Begin, list[bytes]]:
    """Return the trainer's first message, and the lines that arrived with it.

    Raises:
        SystemExit: The first line is no `Begin` message, or the pipe closes before a line arrives.
    """
    while lines.open:
        received = list(lines.read(None))
        if received:
            begin = protocol.decode(received[0])
            if isinstance(begin, protocol.Begin):
                return begin, received[1:]
            break
    raise SystemExit(
        "this is memlog's helper process, which expects its settings on stdin: memlog.init() starts it"
    )
