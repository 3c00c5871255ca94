"""Why a connection failed, in a few words: clients say it with classes and the numbers of objects."""

from __future__ import annotations

import re

from memlog._internal.redact import bare_address

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
    (("No route to host", "Network is unreachable"), "no way to its network"),
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
    """Why a connection failed, by what a client says of it; ``None`` where it says something else."""
    for signs, reason in _REASONS:
        if any(sign in text for sign in signs):
            return reason
    return "no connection" if _POOL.search(text) and "ResponseError" not in text else None


def address_in(text: str) -> str | None:
    """The server that a client says it could not reach; ``None`` where it does not."""
    found = _POOL.search(text)
    if found is None:
        return None
    return f"http{'s' if found['secure'] else ''}://{found['host']}:{found['port']}"


def does_not_answer(tracker: str, address: str | None, reason: str) -> str:
    """One line for a tracker that can't be reached.

    Args:
        tracker: What people call it, such as ``"MLflow"``.
        address: Where it is, which may hold a password; ``None`` where that is not known.
        reason: Why, in a few words.
    """
    at = "" if address is None else f" at {bare_address(address)}"
    return f"{tracker}{at} does not answer ({reason})"
