"""Download of memlog's files from MLflow. It runs in a process of memlog's own."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from memlog._internal.connections import watched
from memlog._internal.redact import bare_address
from memlog.errors import TrackerRejectedError, TrackerUnavailableError, UnknownRunError
from memlog.sink import Connection, StoredArtifact
from memlog_mlflow.errors import error_code, translated
from memlog_mlflow.keys import ARTIFACTS
from memlog_mlflow.probe import probe
from memlog_mlflow.uris import absolute_uri, local_path

_UNKNOWN = frozenset({"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND"})
"""MLflow's error codes for a run id that is unknown or malformed."""
_MAX_KINDS = 100
"""Maximum number of folders whose files are listed. Each folder takes one request."""


class MlflowStore:
    """A `memlog.sink.ArtifactStore` for MLflow. Its methods raise the errors that `ArtifactStore` names.

    Args:
        connection: How to reach MLflow. If it has no URI, MLflow's own default is used.
    """

    def __init__(self, connection: Connection) -> None:
        self._uri = absolute_uri(connection.uri or mlflow.get_tracking_uri())
        self._client: MlflowClient | None = None

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """Return the files below ``memlog/artifacts`` of a run."""
        client = self._connected()
        self._require(client, run_id)
        found = []
        with translated():
            kinds = [info for info in client.list_artifacts(run_id, ARTIFACTS) if info.is_dir]
            for kind in kinds[:_MAX_KINDS]:
                for info in client.list_artifacts(run_id, kind.path):
                    if not info.is_dir:
                        name, label = posixpath.basename(info.path), posixpath.basename(kind.path)
                        found.append(StoredArtifact(name, label, info.file_size))
        return found

    def fetch(
        self,
        run_id: str,
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        """Download one file into ``directory``."""
        if artifact.name in {"", ".", ".."} or posixpath.basename(artifact.name) != artifact.name:
            raise TrackerRejectedError(
                f"{artifact.name!r} is not the name of a file of memlog's: `memlog show` lists them"
            )
        client = self._connected()
        probe(self._uri)  # MLflow itself would try for minutes
        path = f"{ARTIFACTS}/{artifact.kind}/{artifact.name}"

        def download() -> str:
            with translated():
                return str(client.download_artifacts(run_id, path, str(directory)))

        return Path(watched(download, directory, progress))

    def _connected(self) -> MlflowClient:
        if self._client is None:
            path = local_path(self._uri)
            # MLflow would create an empty store at that path.
            if path is not None and not path.exists():
                raise TrackerUnavailableError(
                    f"there is no MLflow store at {path}: set MLFLOW_TRACKING_URI to where it is"
                )
            probe(self._uri)
            with translated():
                self._client = MlflowClient(tracking_uri=self._uri)
        return self._client

    def _require(self, client: MlflowClient, run_id: str) -> None:
        with translated():
            try:
                client.get_run(run_id)
            except MlflowException as error:
                if error_code(error) not in _UNKNOWN:
                    raise
                raise UnknownRunError(
                    f"MLflow at {bare_address(self._uri)} has no run {run_id!r}: set "
                    "MLFLOW_TRACKING_URI to where the run is, or look up its id on MLflow's page"
                ) from None
