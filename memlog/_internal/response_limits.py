"""Bounds on what servers answer, in processes of memlog's own: the helper and the commands.

The trackers' clients bound the silence between two bytes and nothing else: a server that sends a byte a
second holds them for hours, and one that sends without end, or a bomb of gzip, takes all memory.
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
"""Bytes, once unpacked, of an answer that a client reads into memory. A list of thousands of files has 2 MiB.
What is downloaded goes to a file, whose size `memlog pull` bounds."""
_SECONDS = 60.0
"""Time for an answer that is read into memory, and for one whose client sets no bound."""
RATE = 1024
"""Bytes a second that an answer must bring once its client's time for a single read is over."""


def bound_answers() -> None:
    """Bound every answer that Python's HTTP clients get in this process.

    Call it in a process of memlog's own: clients of the user's are none of memlog's business.
    """
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - the trackers' clients bring it

    if http.client.HTTPConnection.response_class is _Answer:
        return
    http.client.HTTPConnection.response_class = _Answer
    send = HTTPAdapter.send

    def bounded_send(self: Any, request: Any, stream: bool = False, **more: Any) -> Any:
        response = send(self, request, stream=stream, **more)
        # What a redirect says is read into memory as well, whoever asked.
        if not stream or response.is_redirect:
            _bound(response.raw)
        return response

    HTTPAdapter.send = bounded_send  # type: ignore[method-assign, assignment]


@contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """Give each answer at most ``seconds``, even if its client would wait longer."""
    before, _TimedReader.limit = _TimedReader.limit, seconds
    try:
        yield
    finally:
        _TimedReader.limit = before


def patience(seconds: float) -> float:
    """Return the seconds that an answer gets: ``seconds``, or less within `waiting_at_most`."""
    return seconds if _TimedReader.limit is None else min(seconds, _TimedReader.limit)


class _Answer(http.client.HTTPResponse):
    """An answer whose bytes are timed as they arrive, its headers' too."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        # All that the parent does with the socket is make a file of it.
        super().__init__(_Timed(sock), *arguments, **named)  # type: ignore[arg-type]


class _Timed:
    """A socket as an answer sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock))


class _TimedReader(io.RawIOBase):
    """Reads an answer, and raises ``TimeoutError`` if that takes too long altogether.

    Attributes:
        limit: Seconds that an answer gets at most, of every one in this process.
    """

    limit: float | None = None

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
    """Bound what a response, of urllib3's, brings once it is unpacked."""
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
