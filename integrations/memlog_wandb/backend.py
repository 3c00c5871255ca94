"""The half of the integration that the trainer's process imports."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

from memlog._internal.credential_scope import Home
from memlog.sink import ArtifactStore, Connection, InProcessRun, Sink, Target, TrackerRun
from memlog_wandb import environment
from memlog_wandb.addresses import address_of
from memlog_wandb.in_process import WandbInProcessRun

logger = logging.getLogger("memlog")


class WandbBackend:
    """Finds the user's W&B run, writes to it in process, and gathers what W&B's client needs to connect."""

    name = "wandb"
    requires = "wandb"
    extra = "wandb"
    in_process = True

    def __init__(self) -> None:
        self._run: Any = None
        self._seen: TrackerRun | None = None
        self._said = False

    def active_run(self) -> TrackerRun | None:
        """The run that the user has open in this process; ``None`` also where wandb is not imported.

        Only attributes are read: ``run.step``, for one, would ask the server.
        """
        run = getattr(sys.modules.get("wandb"), "run", None) or self._only_run()
        if run is None:
            return None
        if run is not self._run:
            settings = _settings(run)
            name = getattr(settings, "run_name", None)
            self._seen = TrackerRun(str(run.id), uri=address_of(settings), name=name)
            self._run = run
        return self._seen

    def _only_run(self) -> Any:
        """The one run that is open where there is no ``wandb.run``: ``reinit="create_new"`` sets none."""
        singleton = getattr(sys.modules.get("wandb.sdk.wandb_setup"), "_singleton", None)
        runs = getattr(singleton, "_active_runs", None)
        if not runs:
            return None
        if len(runs) == 1:
            return runs[0]
        if not self._said and self._run not in runs:
            self._said = True
            logger.warning(
                "memlog: %d W&B runs are open and none is wandb.run: memlog joins none of them; open the "
                "one that it is to join first, or without reinit='create_new'",
                len(runs),
            )
        return None

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        """Begins to write to the user's run, which `active_run` has just found."""
        return WandbInProcessRun(self._run, run.run_id)

    def connection(self) -> Connection:
        """The server's address (``None``: W&B's default) and what the client reads of the environment."""
        run = getattr(sys.modules.get("wandb"), "run", None) or self._only_run()
        found = environment.gathered(None if run is None else _settings(run))
        return Connection(uri=found.get(environment.BASE_URL), environment=found)

    def home(self) -> Home:
        """The server that the environment and wandb's own files name, and whose credentials they hold."""
        return environment.home()

    def prepare(self) -> None:
        """Imports wandb, which takes a second; see `open_sink` for what else that means."""
        self._import("sink", Connection())

    def open_sink(self, target: Target) -> Sink:
        """Builds the sink, and imports wandb for it.

        Call it in a process of memlog's own: it sets environment variables that wandb reads.
        """
        sink: Sink = self._import("sink", target.connection).WandbSink(target)
        return sink

    def open_store(self, connection: Connection) -> ArtifactStore:
        """Builds what brings artifacts back; the same goes for it as for `open_sink`."""
        store: ArtifactStore = self._import("store", connection).WandbStore(connection)
        return store

    @staticmethod
    def _import(half: str, connection: Connection) -> ModuleType:
        # In this order: wandb reads some variables while it is imported.
        environment.apply(connection)
        return importlib.import_module(f"memlog_wandb.{half}")


def _settings(run: Any) -> Any:
    """The run's settings, as they are: its public property makes a deep copy, which takes a millisecond."""
    return getattr(run, "_settings", None)
