"""Backend for W&B. The training process imports this module."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from memlog._internal.connections import CredentialScope
from memlog.sink import ClientBackend, Connection, InProcessRun, TrackerRun
from memlog_wandb import environment
from memlog_wandb.addresses import address_of, link_to
from memlog_wandb.contents import axis_key
from memlog_wandb.in_process import WandbInProcessRun

logger = logging.getLogger("memlog")


class WandbBackend(ClientBackend):
    """Backend that finds the user's W&B run and writes to it from the training process.

    It also gathers the settings that a client needs to connect.
    """

    name = requires = extra = "wandb"
    in_process = True
    sink = "memlog_wandb.sink:WandbSink"
    store = "memlog_wandb.store:WandbStore"

    def __init__(self) -> None:
        self._run: Any = None
        self._seen: TrackerRun | None = None
        self._warned = False

    def active_run(self) -> TrackerRun | None:
        """Return the run that the user has open in this process; ``None`` if there is none.

        If several runs are open and none is ``wandb.run``, the result is ``None``, too. The method reads no
        attribute that sends a request to the server, such as ``run.step``.
        """
        run = _current_run() or self._only_run()
        if run is None:
            return None
        return self._seen if run is self._run else self._noted(run)

    def run_of(self, run_id: str, uri: str | None, name: str | None) -> TrackerRun | None:  # noqa: ARG002 - the open run has both
        """Return the open run whose id is ``run_id``; ``None`` if no such run is open in this process."""
        for run in (_current_run(), *_open_runs()):
            if run is not None and str(run.id) == run_id:
                return self._noted(run)
        return None

    def last_step(self, run: TrackerRun) -> int | None:  # noqa: ARG002 - `_run` is this run
        """Return the last step that a resumed run had. The server has sent it with the run's summary.

        An offline run knows nothing of the run's earlier data.
        """
        if not getattr(_settings(self._run), "resumed", False):
            return None
        last: int | None = self._run.summary.get(axis_key("step"))
        return last

    def may_go_on(self, run: TrackerRun) -> bool:  # noqa: ARG002 - `_run` is this run
        """Return True for an offline run that the user resumes, or resumes if it exists."""
        settings = _settings(self._run)
        return bool(getattr(settings, "_offline", False) and getattr(settings, "resume", None))

    def _noted(self, run: Any) -> TrackerRun:
        settings = _settings(run)
        name = getattr(settings, "run_name", None)
        self._run = run
        self._seen = TrackerRun(str(run.id), address_of(settings), name, link_to(settings))
        return self._seen

    def _only_run(self) -> Any:
        """Return the open run if exactly one run is open, otherwise ``None``.

        The method finds runs with ``reinit="create_new"``. For these runs, W&B does not set ``wandb.run``.
        """
        runs = _open_runs()
        if len(runs) == 1:
            return runs[0]
        if runs and not self._warned and self._run not in runs:
            self._warned = True
            logger.warning(
                "memlog: %d W&B runs are open and none is wandb.run, so memlog joins none of them: open the "
                "right run before the others, or open it without reinit='create_new'",
                len(runs),
            )
        return None

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        """Begin to write to the user's run, which `active_run` has just found."""
        return WandbInProcessRun(self._run, run.run_id)

    def connection(self) -> Connection:
        """Return the server's address (``None``: W&B's default) and the client's environment variables."""
        run = _current_run() or self._only_run()
        found = environment.gathered(None if run is None else _settings(run))
        return Connection(uri=found.get(environment.BASE_URL), environment=found)

    def home(self) -> CredentialScope:
        """Return the server's address, and the names of variables and files with credentials.

        The environment overrides wandb's settings files. If neither names a server,
        the address is that of W&B's default server.
        """
        return environment.home()

    def apply(self, connection: Connection, run: TrackerRun | None = None) -> None:  # noqa: ARG002 - the connection names the server
        """Set W&B's variables, and keep its client quiet."""
        environment.apply(connection)


def _current_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)


def _open_runs() -> Sequence[Any]:
    singleton = getattr(sys.modules.get("wandb.sdk.wandb_setup"), "_singleton", None)
    return getattr(singleton, "_active_runs", None) or ()


def _settings(run: Any) -> Any:
    """Return the run's settings object itself. The public property makes a deep copy, which takes 1 ms."""
    return getattr(run, "_settings", None)
