"""Tracking URIs: their kinds, the files and folders that they name, and links to runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from memlog._internal.redact import bare_address

_SQLITE = "sqlite:///"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_NAMED = frozenset({"databricks", "databricks-uc", "uc"})
"""Names that look like paths, but are URIs for MLflow."""


def scheme_of(uri: str) -> str:
    """Return the scheme in lower case; ``""`` for a path. ``postgresql+psycopg2:`` gives ``"postgresql"``."""
    if uri in _NAMED:
        return uri
    match = _SCHEME.match(uri)
    return match[1].lower().split("+")[0] if match else ""


def absolute_uri(uri: str) -> str:
    """Return ``uri``. A relative path in it is resolved against the working directory."""
    path = _sqlite_path(uri)
    if path is not None:
        query = uri[len(_SQLITE) + len(path) :]
        return f"{_SQLITE}{Path(path).absolute()}{query}"
    if uri and scheme_of(uri) == "":
        return str(Path(uri).absolute())
    return uri


def sqlite_file(uri: str) -> Path | None:
    """Return the SQLite file that ``uri`` names; ``None`` if ``uri`` names no such file.

    The result is also ``None`` if ``uri`` has a query. It is also ``None`` if the path has a ``%``, because
    versions of SQLAlchemy disagree on whether ``%`` is an escape.
    """
    path = _sqlite_path(uri)
    return None if path is None or "%" in path or "?" in uri else Path(path).absolute()


def _sqlite_path(uri: str) -> str | None:
    """Return the path of an SQLite file as written in ``uri``; ``None`` if ``uri`` names no such file."""
    if not uri.startswith(_SQLITE):
        return None
    path = uri[len(_SQLITE) :].partition("?")[0]
    if not path or path == ":memory:" or path.startswith("file:"):
        return None
    return path


def link_to(uri: str, experiment_id: str, run_id: str) -> str | None:
    """Return the address of a run's page, or the command that serves the page.

    An HTTP address gives the page's address. A local file or folder gives the command. Any other ``uri``,
    such as ``databricks``, gives ``None``.
    """
    if scheme_of(uri) in ("http", "https"):
        return f"{bare_address(uri).rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    if local_path(uri) is not None:
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    return None


def is_folder(uri: str) -> bool:
    """Return whether ``uri`` names MLflow's file store."""
    return scheme_of(uri) in {"", "file"}


def local_path(uri: str) -> Path | None:
    """Return the local file or folder that ``uri`` names; ``None`` for other URIs."""
    path = _sqlite_path(uri)
    if path is not None:
        return Path(path)
    if scheme_of(uri) == "file":
        return Path(url2pathname(urlsplit(uri).path))
    return Path(uri) if uri and scheme_of(uri) == "" else None
