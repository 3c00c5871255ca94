"""Connections to servers: reasons of failures, checks before credentials are sent, limits, and progress.

A run's folder may come from anywhere. The credentials in the user's environment belong to the tracker that
the environment names. No other address gets them unless the user allows it.

The trackers' clients limit only the time between two bytes. A server that sends one byte a second would keep
a client waiting for hours. An endless answer, or a small answer that unpacks to a huge size, would take all
memory.
"""

from __future__ import annotations

import http.client
import io
import netrc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from memlog._internal.redact import bare_address, without_credentials
from memlog._internal.secret_names import lazy_pattern
from memlog._internal.terminal import format_bytes

_MAX_TEXT = 200

_REASONS = (
    (("Connection refused", "ECONNREFUSED"), "connection refused"),
    (
        (
            "Name or service not known",
            "nodename nor servname",
            "name resolution",
            "No address associated",
            "NameResolutionError",
        ),
        "no such host name",
    ),
    (("CERTIFICATE_VERIFY_FAILED", "certificate verify failed"), "its certificate is not trusted"),
    (("SSLError", "SSL:"), "no encrypted connection"),
    (("No route to host", "Network is unreachable"), "no route to its network"),
    (("timed out", "TimeoutError"), "timeout"),
    (
        ("reset by peer", "RemoteDisconnected", "Connection aborted", "Broken pipe"),
        "the connection was closed",
    ),
)
_POOL = re.compile(
    r"HTTP(?P<secure>S?)ConnectionPool\(host='(?P<host>[^']*)', port=(?P<port>\d+)\)"
)


def reason_of(text: str) -> str | None:
    """Return why a connection failed, read from a client's message; ``None`` if unknown."""
    for signs, reason in _REASONS:
        if any(sign in text for sign in signs):
            return reason
    return "no connection" if _POOL.search(text) and "ResponseError" not in text else None


def address_in(text: str) -> str | None:
    """Return the unreachable server's address from a client's message; ``None`` if the message names none."""
    match = _POOL.search(text)
    if match is None:
        return None
    host = f"[{match['host']}]" if ":" in match["host"] else match["host"]  # IPv6
    return f"http{'s' if match['secure'] else ''}://{host}:{match['port']}"


def does_not_answer(tracker: str, address: str | None, text: str, reason: str) -> str:
    """Return the one-line message that a tracker can't be reached.

    ``address`` is the tracker's address; ``None``: unknown. A password in the address is removed. ``text`` is
    the client's message. The message may name another server, for example the tracker's file storage.
    """
    named = address_in(text)
    asked = named if address is None else bare_address(address)
    at = "" if asked is None else f" at {asked}"
    if asked and named and origin(named) != (origin(asked) or origin(named)):
        return f"{tracker}{at} leads to {named}, which does not answer ({reason})"
    return f"{tracker}{at} does not answer ({reason})"


def in_full(text: str) -> str:
    """Return a client's message on one line, without credentials."""
    return without_credentials(" ".join(text.split()))


def in_short(text: str) -> str:
    """Return the same as `in_full`, cut to `_MAX_TEXT` characters."""
    line = in_full(text)
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}…"


# Strict, so that all URL parsers read the same host from an address that matches.
_SERVER = lazy_pattern(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?(?:[/?#][^\s\\@]*)?",
    re.IGNORECASE,
)
_PORTS = {"http": 80, "https": 443}
_SCHEME = lazy_pattern(r"(?P<scheme>[a-z][a-z0-9.-]*)(?:\+[a-z0-9.+-]*)?:", re.IGNORECASE)
_ON_THIS_MACHINE = frozenset({"sqlite", "file", "offline", "disabled"})
_FILE = re.compile(r"file:(?://(?:localhost)?(?=/))?|sqlite(?:\+\w+)?:///", re.IGNORECASE)
"""Beginning of the address of a file or folder, before its path."""
_SECRET = lazy_pattern(
    r"token|passw|pwd|secret|key|credential|username|auth|client_cert", re.IGNORECASE
)


class CredentialScope(msgspec.Struct, frozen=True):
    """A tracker's address and credentials in the user's environment."""

    address: str | None
    """The tracker's address; ``None``: the environment names none."""
    credentials: tuple[str, ...] = ()
    """Variables and files with credentials that the tracker's client would send to any address."""
    own_schemes: frozenset[str] = frozenset()
    """Schemes such as ``databricks``. Their addresses name an entry in a user's file instead of a host."""
    defaults: tuple[str, ...] = ()
    """Files and folders in which the tracker's client stores runs if the environment names no address."""


def secret_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that hold credentials, judged by their names."""
    return tuple(
        sorted(name for name, value in environment.items() if value and _SECRET.search(name))
    )


def is_same_place(named: str, known: str | None) -> bool:
    """Return True if ``named`` equals ``known`` or has the same scheme, host and port.

    ``named`` is the address that a run names. ``known`` is an address from the user or the environment;
    ``None``: there is none. If ``named`` contains a user or password, ``named`` must equal ``known``.
    """
    if known is None:
        return False
    bare = bare_address(known)
    if named == known or named.rstrip("/") == bare.rstrip("/"):
        return True
    place = origin(named)
    return place is not None and place == origin(bare)


def withheld(
    address: str | None, scope: CredentialScope, trusted: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the names of variables and files with credentials that ``address`` must not get.

    A client that connects to ``address`` would send these credentials, although they belong to another
    tracker. If the result is empty, memlog may connect.

    ``address`` is the address in a run's folder; ``None``: the folder names no address. ``trusted`` are
    addresses that the user allows, in addition to the address of ``scope``.
    """
    if not address or _is_local(address, scope):
        return ()
    if any(is_same_place(address, known) for known in (scope.address, *trusted)):
        return ()
    return (*scope.credentials, *netrc_files(address))


def is_other_file(address: str | None, scope: CredentialScope, trusted: Iterable[str] = ()) -> bool:
    """Return True if ``address`` is a file or folder that neither the environment nor the user names.

    The tracker's client would create a database there, or change the one that exists. See `withheld` for the
    arguments.
    """
    path = path_of(address) if address and address not in scope.own_schemes else None
    if path is None:
        return False
    return path not in map(path_of, filter(None, (scope.address, *scope.defaults, *trusted)))


def path_of(address: str) -> Path | None:
    """Return the file or folder that ``address`` names; ``None`` for any other address."""
    match = _FILE.match(address)
    if match is None and _SCHEME.match(address):
        return None
    path = address[match.end() if match else 0 :].partition("?")[0]
    # Without links and dots, so that one file has one path.
    return Path(unquote(path) if match else path).expanduser().resolve()


def origin(address: str) -> tuple[str, str, int] | None:
    """Return the scheme, host and port of an HTTP address; ``None`` for any other address."""
    match = _SERVER.fullmatch(address)
    if match is None:
        return None
    scheme = match["scheme"].lower()
    return scheme, match["host"].lower(), int(match["port"] or _PORTS[scheme])


def _is_local(address: str, scope: CredentialScope) -> bool:
    if address in scope.own_schemes:
        return True
    match = _SCHEME.match(address)
    return match is None or match["scheme"].lower() in _ON_THIS_MACHINE | scope.own_schemes


def netrc_files(address: str) -> Iterator[str]:
    """Yield the netrc files in which HTTP clients find a password for the address's host."""
    match = _SERVER.fullmatch(address)
    named = os.environ.get("NETRC")
    for name in [named] if named else ["~/.netrc", "~/_netrc"]:
        path = Path(name).expanduser()
        try:
            known = netrc.netrc(str(path))
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            yield name  # another HTTP client may be able to read this file, and find a password in it
            continue
        if match is None or known.authenticators(match["host"].lower()) is not None:
            yield name


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
        # The client's own limit, which holds again after this read.
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


_POLL = 0.1
"""Seconds between checks of the number of bytes that have arrived."""

_T = TypeVar("_T")


def watched(
    download: Callable[[], _T],
    directory: Path,
    progress: Callable[[int], object],
    on_wait: Callable[[int], object] = lambda _: None,
) -> _T:
    """Run a download in a thread, and report the number of bytes that have arrived.

    The thread is a daemon, so that memlog's command can end even if the tracker no longer answers.

    Args:
        download: Function that downloads into ``directory``. Its result is returned, and its exception is
            raised.
        directory: Folder that contains only this download.
        progress: Function called with the number of bytes that have arrived since the last call.
        on_wait: Function called repeatedly with the number of bytes that have arrived so far. If this
            function raises, `watched` raises the same exception at once. The download is not stopped.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(download())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, name="memlog-download", daemon=True)
    thread.start()
    reported, alive = 0, True
    while alive:
        thread.join(_POLL)
        alive = thread.is_alive()
        arrived = _size(directory)
        if arrived > reported:
            progress(arrived - reported)
            reported = arrived
        if alive:
            on_wait(reported)
    if errors:
        raise errors[0]
    return results[0]


def _size(directory: Path) -> int:
    """Return the bytes of all files in a folder that is being written."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:  # noqa: PERF203 - it was renamed meanwhile
            continue
    return total
