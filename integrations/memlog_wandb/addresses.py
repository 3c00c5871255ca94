"""Address of a W&B run as one text: ``<server>/<entity>/<project>/runs/<id>``, or an offline run's folder."""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

from memlog.sink import DISABLED, OFFLINE

_RUN = re.compile(r"(?P<server>https?://.+?)/(?P<path>[^/]+/[^/]+)/runs/(?P<run_id>[^/]+)/?")
_OFFLINE_RUN = re.compile(
    OFFLINE + r"(?P<folder>.*)#(?P<path>(?:[^/#]+/){0,2})runs/(?P<run_id>[^/#]+)"
)


class RunPath(NamedTuple):
    """Path of a run in W&B's public API."""

    entity: str | None
    project: str | None
    run_id: str

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


def address_of(settings: Any) -> str | None:
    """Return the address of the run with these settings.

    An offline run's address needs no entity and no project. If an online run lacks its entity, project or
    id, return the server's address.
    """
    if getattr(settings, "_noop", False):
        return DISABLED
    entity, project = getattr(settings, "entity", None), getattr(settings, "project", None)
    run_id = getattr(settings, "run_id", None)
    if getattr(settings, "_offline", False) and run_id:
        path = "".join(f"{part}/" for part in (entity if project else None, project) if part)
        return f"{OFFLINE}{settings.sync_dir}#{path}runs/{run_id}"
    server = getattr(settings, "base_url", None)
    if not server:
        return None
    if entity and project and run_id:
        return f"{server.rstrip('/')}/{entity}/{project}/runs/{run_id}"
    return str(server)


def link_to(settings: Any) -> str | None:
    """Return the address of the run's page, or the command that uploads an offline run.

    The result is ``None`` if the run is disabled, or its entity is unknown.
    """
    if getattr(settings, "_noop", False):
        return None
    if getattr(settings, "_offline", False):
        return f"wandb sync {shlex.quote(str(settings.sync_dir))}"
    return getattr(settings, "run_url", None) or None


def server_of(address: str | None) -> str | None:
    """Return the server in the address of a server or run; ``None`` if the address names no server."""
    if not address or address.startswith((OFFLINE, DISABLED)):
        return None
    found = _RUN.fullmatch(address)
    return found["server"] if found else address


def offline_folder(address: str | None) -> str | None:
    """Return the folder of an offline run; ``None`` if the address is not that of an offline run."""
    found = _OFFLINE_RUN.fullmatch(address or "")
    return found["folder"] if found else None


def run_path(run: str) -> RunPath:
    """Parse ``run``: an address, or the text ``entity/project/id``, ``project/id`` or ``id``."""
    found = _RUN.fullmatch(run) or _OFFLINE_RUN.fullmatch(run)
    path = f"{found['path'].rstrip('/')}/{found['run_id']}" if found else run
    parts = path.lstrip("/").split("/")
    entity, project, run_id = ([None] * 3 + [*parts])[-3:]
    return RunPath(entity, project, run_id or run)
