"""Store of the artifacts in a run's own folder. It has the same interface as a tracker's store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memlog.errors import ArtifactError, TrackerUnavailableError, UnknownRunError
from memlog.events import Artifact
from memlog.journal import RunDirectory
from memlog.journal.artifacts import open_artifact
from memlog.sink import StoredArtifact

_CHUNK = 1024**2


class JournalStore:
    """A `memlog.sink.ArtifactStore` over one run's folder."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._events: list[Artifact] | None = None

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """Return the run's files, the newest last, including files that are missing from the folder.

        Raises:
            UnknownRunError: ``run_id`` is another run's id.
            TrackerUnavailableError: The run's folder does not exist.
        """
        if run_id != self._run.id:
            raise UnknownRunError(f"{self._run.path} is run {self._run.id} and not {run_id!r}")
        self._require_folder()
        self._events = kept(self._run)
        return [StoredArtifact(event.name, event.kind, event.size) for event in self._events]

    def fetch(
        self,
        run_id: str,  # noqa: ARG002 - this store has one run
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        self._require_folder()
        events = kept(self._run) if self._events is None else self._events
        wanted = (artifact.name, artifact.kind)
        event = next((event for event in events if (event.name, event.kind) == wanted), None)
        if event is None:
            raise ArtifactError(f"run {self._run.id} has kept no file {artifact.name!r}")
        source = open_artifact(self._run, event)
        if source is None:
            raise ArtifactError(
                f"{event.name!r} is no longer in {self._run.path}: pass a tracker that has it with --backend"
            )
        target = directory / event.name
        with source as file, target.open("xb") as copy:
            while chunk := file.read(_CHUNK):
                copy.write(chunk)
                progress(len(chunk))
        return target

    def _require_folder(self) -> None:
        if not self._run.path.is_dir():
            raise TrackerUnavailableError(
                f"{self._run.path} does not exist: check that its disk is mounted"
            )


def kept(run: RunDirectory) -> list[Artifact]:
    """Return the artifacts in the journal, the newest last.

    If several artifacts have the same name, only the newest of them is returned.
    """
    events = [
        entry.event
        for file in run.files()
        for entry in file.read(complete=True)
        if isinstance(entry.event, Artifact)
    ]
    newest: dict[str, Artifact] = {}
    for event in sorted(events, key=lambda event: event.time_us):
        newest.pop(event.name, None)
        newest[event.name] = event
    return list(newest.values())
