"""Backend for trackio. The training process imports this module."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from memlog._internal.connections import CredentialScope
from memlog.sink import ClientBackend, Connection, TrackerRun
from memlog_trackio import environment
from memlog_trackio.addresses import RunAddress, link_to, run_address


class TrackioBackend(ClientBackend):
    """Backend that finds the user's Trackio run and gathers the settings that a client needs to connect."""

    name = requires = extra = "trackio"
    sink = "memlog_trackio.sink:TrackioSink"
    store = "memlog_trackio.store:TrackioStore"

    def __init__(self) -> None:
        # One pair, because each thread may have a run of its own.
        self._seen: tuple[Any, TrackerRun | None] = (None, None)

    def active_run(self) -> TrackerRun | None:
        """Return the run that the user has open in this `contextvars` context; ``None`` if there is none."""
        run = _open_run()
        if run is None:
            return None
        seen, found = self._seen
        if run is not seen:
            address = RunAddress(environment.location(run), run.project, run.name)
            found = TrackerRun(run.id, str(address), run.name, link_to(address))
            self._seen = run, found
        return found

    def last_step(self, run: TrackerRun) -> int | None:
        """Return the last step that a resumed run had, which ``trackio.init`` has read."""
        active = _open_run()
        if active is None or active.id != run.run_id:
            return None
        last: int | None = getattr(active, "_initial_last_step", None)
        return last

    def run_of(self, run_id: str, uri: str | None, name: str | None) -> TrackerRun | None:
        """Return the run ``run_id``; ``None`` if the run is not open here and ``uri`` names no project."""
        active = self.active_run()
        if active is not None and active.run_id == run_id:
            return active
        address = run_address(uri or "")
        if address.project is None:
            return None
        return TrackerRun(run_id, uri, name or address.run, link_to(address))

    def connection(self) -> Connection:
        """Return the address of Trackio's folder or server, and the client's environment variables."""
        run = _open_run()
        return Connection(environment.location(run), environment.gathered(run))

    def home(self) -> CredentialScope:
        """Return the address for new runs, and the names of variables and files with credentials."""
        return environment.home()

    def prepare(self) -> None:
        """Import the slow part of trackio's client.

        trackio itself is not imported yet. trackio reads the path of its folder only during its import, and
        `open_sink` has to set this path first.
        """
        importlib.import_module("gradio_client")

    def apply(self, connection: Connection, run: TrackerRun | None = None) -> None:
        """Set trackio's variables, with the folder of the run."""
        environment.apply(connection, run.uri if run else None)


def _open_run() -> Any:
    current = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
    return None if current is None else current.get()
