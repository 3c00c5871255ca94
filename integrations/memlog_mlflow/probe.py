"""Check that the tracker at a URI can be reached."""

from __future__ import annotations

import os
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from memlog_mlflow.errors import refused, translated, unavailable
from memlog_mlflow.uris import scheme_of

TIMEOUT = 2
"""Maximum seconds to wait for a connection. For a server's answer, the time limit of MLflow's client applies.
So a slow server counts as reachable, and memlog sends data to it."""

_REFUSALS = frozenset({401, 403})
_TOO_MANY = 429
_SERVER_ERROR = 500
_PORTS = {"postgresql": 5432, "mysql": 3306}


def probe(uri: str) -> None:
    """Check the server or database at ``uri``. Other kinds of URI, such as a folder, are not checked.

    Raises:
        TrackerUnavailableError: the tracker can't be reached, has a failure, or refuses the credentials.
    """
    scheme = scheme_of(uri)
    with translated(uri):
        if scheme in {"http", "https"}:
            _ask_server(uri)
        elif scheme == "sqlite":
            _ask_sqlite(uri)
        elif scheme in _PORTS:
            _ask_database(uri, _PORTS[scheme])


def _ask_server(uri: str) -> None:
    """Request a tracking server's ``/health``, with the credentials and certificates of the client.

    The answer 404 counts as success: servers behind a proxy, old ones and hosted ones have no such page.
    """
    # The page may be endless, so it is opened as a stream and not read.
    response = http_request(  # type: ignore[no-untyped-call]  # mlflow types neither
        get_default_host_creds(uri),  # type: ignore[no-untyped-call]
        "/health",
        "GET",
        max_retries=0,
        timeout=(TIMEOUT, MLFLOW_HTTP_REQUEST_TIMEOUT.get()),  # type: ignore[no-untyped-call]  # as above
        raise_on_status=False,
        stream=True,
    )
    response.close()
    status: int = response.status_code
    if status in _REFUSALS:
        raise refused(str(status))
    if status >= _SERVER_ERROR or status == _TOO_MANY:
        raise unavailable(f"{uri} answers {status}")


def _ask_sqlite(uri: str) -> None:
    """Check a database file without creating it.

    The check does not use MLflow's client. The client would try for minutes to open an unusable file. If a
    network share is not mounted, the client would create a folder at the path of the share.
    """
    # Imported here, because a client for tracking servers may lack SQLAlchemy. The installed SQLAlchemy must
    # parse the URI, because its versions disagree on whether a path is percent-encoded.
    from sqlalchemy.engine import make_url  # noqa: PLC0415

    database = make_url(uri).database
    if not database or database.startswith((":memory:", "file:")):
        return
    path = Path(database).absolute()
    if not path.exists():
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise unavailable(f"there is no folder {path.parent} that can be written")
        return
    try:
        _read_sqlite(path)
    except sqlite3.Error as error:
        raise unavailable(f"{path}: {error}") from None


def _read_sqlite(path: Path) -> None:
    uri = f"file:{quote(str(path))}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT)) as connection:
        connection.execute("PRAGMA schema_version").fetchone()


def _ask_database(uri: str, default_port: int) -> None:
    """Open and close a connection to a database server. MLflow's client would retry for minutes."""
    from sqlalchemy.engine import make_url  # noqa: PLC0415

    url = make_url(uri)
    # Without a host, the driver uses a socket file. With several hosts, it chooses one. Neither is checked.
    if url.host and "," not in url.host:
        with socket.create_connection((url.host, url.port or default_port), timeout=TIMEOUT):
            pass
