"""Where a run that the journal knows is: its address without, and the environment's with credentials."""

from __future__ import annotations

from pathlib import Path

from memlog.redact import without_credentials
from memlog.sink import DISABLED, OFFLINE, Connection


def known_address(known: str | None, connection: Connection) -> str | None:
    """The journal's address of a run, with the user and password that the environment has for it."""
    if known is None:
        return connection.uri
    for candidate in (connection.uri, *connection.environment.values()):
        if candidate and without_credentials(candidate).rstrip("/") == known.rstrip("/"):
            return candidate
    return known


def told_place(backend: str, uri: str | None) -> str:
    """Where a tracker's run is, to follow its id; empty where nobody knows."""
    if not uri:
        return ""
    if uri.startswith(DISABLED):
        return ", disabled: nothing is kept of it"
    if uri.startswith(OFFLINE):
        folder = _near(uri.removeprefix(OFFLINE).rpartition("#")[0])
        return f", offline in {folder}: `{backend} sync {folder}` uploads it"
    return f" at {uri}"


def _near(folder: str) -> str:
    """A folder, from here where it is below."""
    path, here = Path(folder), Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) else folder
