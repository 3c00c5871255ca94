"""Where a run that the journal knows is: its address without, and the environment's with credentials."""

from __future__ import annotations

from memlog.redact import without_credentials
from memlog.sink import Connection


def known_address(known: str | None, connection: Connection) -> str | None:
    """The journal's address of a run, with the user and password that the environment has for it."""
    if known is None:
        return connection.uri
    for candidate in (connection.uri, *connection.environment.values()):
        if candidate and without_credentials(candidate).rstrip("/") == known.rstrip("/"):
            return candidate
    return known
