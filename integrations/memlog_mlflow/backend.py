"""The half of the integration that the trainer's process imports."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType

from memlog._internal.credential_scope import Home
from memlog.sink import ArtifactStore, Connection, Sink, Target, TrackerRun
from memlog_mlflow import environment
from memlog_mlflow.uris import absolute_uri


class _Seen(threading.local):
    """The run that this thread was last found to have open: MLflow's active run is thread-local."""

    run: TrackerRun | None = None


class MlflowBackend:
    """Finds the user's MLflow run and gathers what MLflow's client needs to connect."""

    name = "mlflow"
    requires = "mlflow"
    extra = "mlflow"
    in_process = False

    def __init__(self) -> None:
        self._seen = _Seen()

    def active_run(self) -> TrackerRun | None:
        """The run that the user has open on this thread.

        ``None`` also where mlflow is not imported. What mlflow itself raises is passed on.
        """
        mlflow = _imported_mlflow()
        run = None if mlflow is None else mlflow.active_run()
        if mlflow is None or run is None:
            return None
        run_id: str = run.info.run_id
        seen = self._seen.run
        if seen is None or seen.run_id != run_id:
            # Resolving the URI may look at the disk, so it is done once a run.
            uri = absolute_uri(mlflow.get_tracking_uri())
            seen = TrackerRun(run_id, uri=uri, name=run.info.run_name)
            self._seen.run = seen
        return seen

    def connection(self) -> Connection:
        """The tracking URI (``None``: MLflow's default) and what the client reads of the environment."""
        mlflow = _imported_mlflow()
        found = environment.gathered()
        if mlflow is None:
            return Connection(uri=found.get(environment.TRACKING_URI), environment=found)
        return Connection(uri=absolute_uri(mlflow.get_tracking_uri()), environment=found)

    def home(self) -> Home:
        """Where the environment says that MLflow is, and the credentials that go with every request."""
        return Home(
            environment.gathered().get(environment.TRACKING_URI),
            environment.credentials(),
            own_schemes=frozenset({"databricks", "databricks-uc", "uc"}),
        )

    def prepare(self) -> None:
        """Imports mlflow, which takes seconds; see `open_sink` for what else that means."""
        self._import("sink", Connection())

    def open_sink(self, target: Target) -> Sink:
        """Builds the sink, and imports mlflow for it.

        Call it in a process of memlog's own: it sets environment variables that bound MLflow's
        timeouts and retries.
        """
        sink: Sink = self._import("sink", target.connection).MlflowSink(target)
        return sink

    def open_store(self, connection: Connection) -> ArtifactStore:
        """Builds what brings files back; like `open_sink`, in a process of memlog's own."""
        store: ArtifactStore = self._import("store", connection).MlflowStore(connection)
        return store

    @staticmethod
    def _import(module: str, connection: Connection) -> ModuleType:
        # In this order: mlflow reads some variables while it is imported.
        environment.apply(connection)
        return importlib.import_module(f"memlog_mlflow.{module}")


def _imported_mlflow() -> ModuleType | None:
    """The module ``mlflow``, if it is imported and usable.

    Another thread may be in the middle of importing it, and a folder called ``mlflow`` in the
    working directory makes an empty namespace package: neither has these functions.
    """
    module = sys.modules.get("mlflow")
    if hasattr(module, "active_run") and hasattr(module, "get_tracking_uri"):
        return module
    return None
