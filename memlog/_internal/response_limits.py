"""Limits on the size and duration of servers' answers, in the helper process and in memlog's commands.

The trackers' clients limit only the time between two bytes. A server that sends one byte a second would keep
a client waiting for hours. An endless answer, or a small answer that unpacks to a huge size, would take all
memory.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memlog._internal.units import format_bytes

MAX_ANSWER = 32 * 1024**2
"""Maximum unpacked bytes of an answer that a client reads into memory. For comparison, a tracker's list
of thousands of files has 2 MiB. Downloads go to a file; `memlog pull` limits their size."""
_SECONDS = 60.0
"""Maximum seconds for an answer in memory. Clients without a time limit also get this limit."""
RATE = 1024
"""Number of received bytes that extend an answer's time limit by a second."""


def bound_answers() -> None:
    """Limit every answer that Python's HTTP clients get in this process.

    Call this function only in memlog's own processes. The user's clients must stay unchanged.
    """
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - the trackers' clients bring it

    if http.client.HTTPConnection.response_class is _Answer:
        return
    http.client.HTTPConnection.response_class = _Answer
    send = HTTPAdapter.send

    def bounded_send(self: Any, request: Any, stream: bool = False, **more: Any) -> Any:
        response = send(self, request, stream=stream, **more)
        # requests reads a redirect's body into memory even when streaming.
        if not stream or response.is_redirect:
            _bound(response.raw)
        return response

    HTTPAdapter.send = bounded_send  # type: ignore[method-assign, assignment]


@contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """Limit the time of each answer to ``seconds``, even if its client would wait longer.

    Each `RATE` bytes that arrive extend the time by a second.
    """
    before, _TimedReader.limit = _TimedReader.limit, seconds
    try:
        yield
    finally:
        _TimedReader.limit = before


def patience(seconds: float) -> float:
    """Return the lower of ``seconds`` and the time limit of `waiting_at_most`."""
    return seconds if _TimedReader.limit is None else min(seconds, _TimedReader.limit)


class _Answer(http.client.HTTPResponse):
    """An answer with a time limit on all its bytes, headers included."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        # The parent class only calls makefile() on the socket.
        super().__init__(_Timed(sock), *arguments, **named)  # type: ignore[arg-type]


class _Timed:
    """Stand-in for a socket. Its method ``makefile`` returns a file with a time limit."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock))


class _TimedReader(io.RawIOBase):
    """Reader of one answer. It raises ``TimeoutError`` if the whole answer takes too long."""

    limit: float | None = None
    """Seconds that `waiting_at_most` allows for an answer in this process; ``None``: `waiting_at_most` is
    not active."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._patience = patience(sock.gettimeout() or _SECONDS)
        self._begun = time.monotonic()
        self._received = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        spent = time.monotonic() - self._begun
        left = self._patience + self._received / RATE - spent
        if left <= 0:
            raise TimeoutError(f"the answer is too slow: {self._received:,} bytes in {spent:.0f} s")
        before = self._sock.gettimeout()
        self._sock.settimeout(min(left, self._patience))
        try:
            count = self._raw.readinto(buffer)
        finally:
            self._sock.settimeout(before)
        self._received += count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _bound(raw: Any) -> None:
    """Limit the unpacked size and the duration of a urllib3 response."""
    stream = raw.stream

    def bounded(amt: int | None = None, decode_content: bool | None = None) -> Iterator[bytes]:
        left, ends = MAX_ANSWER, time.monotonic() + _SECONDS
        for chunk in stream(amt, decode_content=decode_content):
            left -= len(chunk)
            if left < 0:
                raw.close()
                raise OSError(f"the answer is larger than {format_bytes(MAX_ANSWER)}")
            if time.monotonic() > ends:
                raw.close()
                raise TimeoutError(f"the answer takes longer than {_SECONDS:g} s")
            yield chunk

    raw.stream = bounded
