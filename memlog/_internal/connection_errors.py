"""Short reasons for failed connections, instead of clients' messages with class names and object ids."""

from __future__ import annotations

import re

from memlog._internal.credential_scope import origin
from memlog._internal.redact import bare_address, without_credentials

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
    found = _POOL.search(text)
    if found is None:
        return None
    host = f"[{found['host']}]" if ":" in found["host"] else found["host"]  # IPv6
    return f"http{'s' if found['secure'] else ''}://{host}:{found['port']}"


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
