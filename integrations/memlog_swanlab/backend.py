"""Backend for SwanLab, and the addresses of its runs. The training process imports this module."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from memlog.sink import DISABLED, ClientBackend, Connection, TrackerRun

_FOLDER = "file://"
_DEFAULT_FOLDER = "swanlog"


class SwanlabBackend(ClientBackend):
    """Backend that finds the user's SwanLab run, and the folder in which SwanLab stores runs."""

    name = requires = extra = "swanlab"
    sink = "memlog_swanlab.sink:SwanlabSink"

    def __init__(self) -> None:
        # One pair, because each thread may call.
        self._seen: tuple[Any, TrackerRun | None] = (None, None)

    def active_run(self) -> TrackerRun | None:
        """Return the run that the user has open in this process; ``None`` if there is none."""
        run = getattr(sys.modules.get("swanlab.sdk.internal.run"), "_current_run", None)
        if run is None or not run.alive:
            return None
        seen, found = self._seen
        if run is not seen:
            settings = run._ctx.config.settings  # noqa: SLF001 - the public properties lack the project
            address, link = DISABLED, None
            if settings.mode != "disabled":
                project = settings.project
                address = address_of(settings.log_dir, project.name, project.workspace)
                folder = shlex.quote(str(settings.log_dir.absolute()))
                link = f"swanlab sync --id {run.id} {folder}/run-*-{run.id}-*"  # memlog's folder
            found = TrackerRun(run.id, address, run.name, link)
            self._seen = run, found
        return found

    def run_of(self, run_id: str, uri: str | None, name: str | None) -> TrackerRun | None:
        """Return the run ``run_id``; ``None`` if it is not open here and ``uri`` names no folder."""
        active = self.active_run()
        if active is not None and active.run_id == run_id:
            return active
        return TrackerRun(run_id, uri, name) if (uri or "").startswith(_FOLDER) else None

    def connection(self) -> Connection:
        """Return the folder for runs. memlog uploads nothing, so it needs no key."""
        return Connection(address_of(Path(os.environ.get("SWANLAB_LOG_DIR") or _DEFAULT_FOLDER)))


def address_of(folder: Path, project: str | None = None, workspace: str | None = None) -> str:
    """Return the address of runs in a folder: ``file:///folder?project=…&workspace=…``."""
    names = {"project": project, "workspace": workspace}
    query = urlencode({key: name for key, name in names.items() if name}, quote_via=quote)
    address = f"{_FOLDER}{quote(str(folder.absolute()))}"
    return f"{address}?{query}" if query else address


def parts_of(address: str) -> tuple[Path, dict[str, str]]:
    """Return the folder, and the project and workspace that an address names."""
    folder, _, query = address.removeprefix(_FOLDER).partition("?")
    return Path(unquote(folder)), dict(parse_qsl(query))
