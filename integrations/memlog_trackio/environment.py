"""Environment variables that Trackio's client reads. memlog passes them to its helper process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from memlog._internal.connections import CredentialScope, secret_names
from memlog.sink import ClientVariables, Connection
from memlog_trackio.addresses import in_folder, in_space, on_server, run_address

DIR = "TRACKIO_DIR"
WRITE_TOKEN = "TRACKIO_WRITE_TOKEN"  # noqa: S105 - a variable's name

_SERVER, _SPACE = "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"
_VARIABLES = ClientVariables(
    ("TRACKIO_", "HF_", "HUGGINGFACE_"),
    frozenset({"XDG_CACHE_HOME"}),
    always={"HF_HUB_DISABLE_TELEMETRY": "1"},  # the user did not start this process
)
_LOGIN = "~/.cache/huggingface/token"


def gathered(run: Any = None) -> dict[str, str]:
    """Return the environment variables of this process that Trackio's client needs in the helper.

    Args:
        run: The user's open run. Its settings override the environment. ``None``: no run is open.
    """
    found = _VARIABLES.gathered()
    found[DIR] = str(folder())
    server = found.get(_SERVER, "")
    if given := parse_qs(urlsplit(server).query).get("write_token"):
        found.setdefault(WRITE_TOKEN, given[0])
    if token := getattr(run, "_write_token", None):
        found[WRITE_TOKEN] = str(token)
    return found


def location(run: Any = None) -> str:
    """Return the address of the folder or server that has ``run``.

    If ``run`` is ``None``, return the address at which Trackio would open a new run.
    """
    space = getattr(run, "_space_id", None) if run else os.environ.get(_SPACE)
    server = getattr(run, "_server_base_url", None) if run else os.environ.get(_SERVER)
    if space:
        return in_space(space)
    return on_server(server) if server else in_folder(folder())


def folder() -> Path:
    """Return the folder with Trackio's databases."""
    # Trackio reads the variable only when it is imported. A later change has no effect.
    known = getattr(sys.modules.get("trackio.utils"), DIR, None) or os.environ.get(DIR)
    if known:
        return Path(known).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser().absolute() / "trackio"


def home() -> CredentialScope:
    """Return the address for new runs, and the names of variables and files with credentials."""
    credentials = list(secret_names(gathered()))
    if Path(_LOGIN).expanduser().exists():
        credentials.append(_LOGIN)
    return CredentialScope(location(), tuple(credentials))


def apply(connection: Connection, uri: str | None = None) -> None:
    """Set the environment variables of Trackio's client.

    Call this function only in a process of memlog's own, before the import of trackio.

    Args:
        connection: How the client connects.
        uri: Address of the run to write to; ``None``: a new run at the connection's address.
    """
    _VARIABLES.apply(connection)
    known = run_address(uri or connection.uri or "").folder
    if known is not None:
        os.environ[DIR] = str(known)
