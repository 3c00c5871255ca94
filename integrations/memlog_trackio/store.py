"""Download of memlog's artifacts from Trackio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memlog.errors import TrackerRejectedError, UnknownRunError
from memlog.sink import Connection, StoredArtifact
from memlog_trackio.addresses import run_address
from memlog_trackio.client import client_for
from memlog_trackio.sink import KIND, METADATA


class TrackioStore:
    """A `memlog.sink.ArtifactStore` for Trackio. Its methods raise the errors that `ArtifactStore` names.

    Callers name a run by its id, or by ``project/id`` if the connection's address names no project.

    Args:
        connection: How to reach Trackio. Its address names the run, or only Trackio's folder or server.
    """

    def __init__(self, connection: Connection) -> None:
        self._address = run_address(connection.uri or "")
        self._client = client_for(self._address, connection.environment)

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """Return the files that memlog stored in the run."""
        return [stored for stored, _ in self._found(run_id)]

    def fetch(
        self,
        run_id: str,
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        """Download one file to ``directory / artifact.name``."""
        for stored, digest in self._found(run_id):
            if (stored.name, stored.kind) == (artifact.name, artifact.kind):
                file = directory / stored.name
                project, _ = self._named(run_id)
                self._client.fetch(project, digest, file, progress)
                return file
        raise TrackerRejectedError(
            f"the Trackio run {run_id} has no artifact {artifact.name!r}: `memlog show` lists its files"
        )

    def _named(self, run_id: str) -> tuple[str, str]:
        project, _, run = run_id.rpartition("/")
        if not (project or self._address.project):
            raise UnknownRunError(f"Trackio has runs in projects: name it as PROJECT/{run_id}")
        return project or str(self._address.project), run

    def _found(self, run_id: str) -> Iterator[tuple[StoredArtifact, str]]:
        """Yield the files that memlog stored in a run, each with the digest of its content."""
        project, run = self._named(run_id)
        runs = self._client.ask("get_runs_for_project", project=project)
        name = next((record["name"] for record in runs if record["id"] == run), None)
        if name is None:
            raise UnknownRunError(
                f"Trackio's project {project!r} at {self._address.location} has no run {run!r}: look up its "
                "id on Trackio's page"
            )
        links = self._client.ask("get_run_artifacts", project=project, run_name=name, run_id=run)
        for link in links["output"]:
            held: Any = self._client.ask(
                "get_artifact_manifest",
                project=project,
                name=link["name"],
                spec=f"v{link['version']}",
            )
            known = (held or {}).get("metadata") or {}
            file = known.get(METADATA)
            if isinstance(file, str) and Path(file).name == file:
                (entry,) = held["manifest"]
                stored = StoredArtifact(file, str(known.get(KIND)), entry["size"])
                yield stored, entry["digest"]
