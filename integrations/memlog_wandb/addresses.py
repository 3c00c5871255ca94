"""Where a W&B run is, as one text: ``<server>/<entity>/<project>/runs/<id>``."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_RUN = re.compile(r"(?P<server>https?://.+?)/(?P<path>[^/]+/[^/]+)/runs/(?P<run_id>[^/]+)/?")


class RunPath(NamedTuple):
    """A run, as W&B's public API names it."""

    entity: str | None
    project: str | None
    run_id: str

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


def address_of(settings: Any) -> str | None:
    """The address of the run with these settings; the server's alone where the rest is not known.

    An offline run has no entity: which one it will get is decided when it is synced.
    """
    server = getattr(settings, "base_url", None)
    if not server:
        return None
    entity, project = getattr(settings, "entity", None), getattr(settings, "project", None)
    run_id = getattr(settings, "run_id", None)
    if entity and project and run_id:
        return f"{server.rstrip('/')}/{entity}/{project}/runs/{run_id}"
    return str(server)


def server_of(address: str | None) -> str | None:
    """The server's part of a server's or run's address."""
    if not address:
        return None
    found = _RUN.fullmatch(address)
    return found["server"] if found else address


def run_path(run: str) -> RunPath:
    """Reads a run's address, ``entity/project/id``, ``project/id`` or the id alone."""
    found = _RUN.fullmatch(run)
    parts = [*found["path"].split("/"), found["run_id"]] if found else run.split("/")
    entity, project, run_id = ([None] * 3 + [*parts])[-3:]
    return RunPath(entity, project, run_id or run)
