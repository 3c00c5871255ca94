"""Backend for MLflow. The training process imports this module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memlog._internal.connections import CredentialScope
from memlog.events import Status
from memlog.sink import STEP_PREFIX, ClientBackend, Connection, TrackerRun
from memlog_mlflow import ends, environment
from memlog_mlflow.uris import absolute_uri, link_to


class _Seen(threading.local):
    """Run that `active_run` last returned on this thread. In MLflow, each thread has its own active run."""

    run: TrackerRun | None = None


def _run_of_main_thread() -> Any:
    known = getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_run_stack", None)
    if known is None or threading.current_thread() is threading.main_thread():
        return None
    runs = known.get_all_thread_values().get(threading.main_thread().ident)
    return runs[-1] if runs else None


class MlflowBackend(ClientBackend):
    """Backend that finds the user's MLflow run and gathers the settings that a client needs to connect."""

    name = requires = extra = "mlflow"
    sink = "memlog_mlflow.sink:MlflowSink"
    store = "memlog_mlflow.store:MlflowStore"

    def __init__(self) -> None:
        self._seen = _Seen()

    def active_run(self) -> TrackerRun | None:
        """Return the run that the user has open on this thread, or else on the main thread.

        The result is ``None`` if no run is open, or if mlflow is not imported. Errors that mlflow raises are
        not caught.
        """
        mlflow = _imported_mlflow()
        if mlflow is None:
            return None
        # Threads that train inside a run of the main thread, such as workers of A3C, have none of their own.
        run = mlflow.active_run() or _run_of_main_thread()
        if run is None:
            return None
        run_id: str = run.info.run_id
        seen = self._seen.run
        if seen is None or seen.run_id != run_id:
            # Resolving the URI may read the disk, so it is done only one time for each run.
            uri = absolute_uri(mlflow.get_tracking_uri())
            link = link_to(uri, run.info.experiment_id, run_id)
            seen = TrackerRun(run_id, uri, run.info.run_name, link)
            self._seen.run = seen
        return seen

    def last_step(self, run: TrackerRun) -> int | None:
        """Return the run's last step, from the data with which ``mlflow`` opened the run.

        It is that of memlog's values. If the run has none, an earlier job did not use memlog: then it is the
        last step of the user's metrics.
        """
        mlflow = _imported_mlflow()
        active = None if mlflow is None else mlflow.active_run()
        if active is None or active.info.run_id != run.run_id:
            return None
        # The public property has no steps.
        held = getattr(active.data, "_metric_objs", ())
        own = [one.step for one in held if one.key.startswith(STEP_PREFIX)]
        # MLflow numbers its readings of the system from 0.
        users = [one.step for one in held if not one.key.startswith("system/")]
        return max(own or users, default=None)

    def run_of(self, run_id: str, uri: str | None, name: str | None) -> TrackerRun | None:
        """Return the run ``run_id`` in the store ``uri``. Without ``uri``, use MLflow's current store."""
        mlflow = _imported_mlflow()
        address = uri or (None if mlflow is None else mlflow.get_tracking_uri())
        return TrackerRun(run_id, None if address is None else absolute_uri(address), name)

    def watch_ends(self, before: Callable[[str, Status], object]) -> Callable[[], object]:
        """Call ``before`` with a run's id and status each time the program is about to end a run."""
        return ends.watch(before)

    def connection(self) -> Connection:
        """Return the tracking URI (``None``: MLflow's default) and the client's environment variables."""
        mlflow = _imported_mlflow()
        found = environment.gathered()
        if mlflow is None:
            return Connection(uri=found.get(environment.TRACKING_URI), environment=found)
        return Connection(uri=absolute_uri(mlflow.get_tracking_uri()), environment=found)

    def home(self) -> CredentialScope:
        """Return the environment's tracking URI, and the names of variables and files with credentials."""
        return CredentialScope(
            environment.gathered().get(environment.TRACKING_URI),
            environment.credentials(),
            own_schemes=frozenset({"databricks", "databricks-uc", "uc"}),
            defaults=("mlruns", "sqlite:///mlflow.db"),
        )

    def apply(self, connection: Connection, run: TrackerRun | None = None) -> None:  # noqa: ARG002 - the store is enough
        """Set MLflow's variables, among them limits of its timeouts and retries."""
        environment.apply(connection)


def _imported_mlflow() -> ModuleType | None:
    """Return the module ``mlflow`` if it is imported and usable, otherwise ``None``.

    The module is not usable while another thread is importing it. It is also not usable if it is the empty
    namespace package that Python makes of a folder called ``mlflow`` in the working directory.
    """
    module = sys.modules.get("mlflow")
    if hasattr(module, "active_run") and hasattr(module, "get_tracking_uri"):
        return module
    return None
