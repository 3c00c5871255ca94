"""A store of files that a test can make misbehave, and helpers of the tests of trackers' stores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from memlog.events import Artifact
from memlog.sink import Sink, StoredArtifact


def stored(name: str, kind: str = "file", size: int | None = None) -> StoredArtifact:
    return StoredArtifact(name, kind, size)


class DictStore:
    """Store of contents by name.

    Args:
        contents: Bytes of each file, by its name.
        listed: Artifacts that the store claims to have. By default, it lists all contents with their sizes.
        bring: Function that replaces the download. It gets the wanted path and returns the path made.
    """

    def __init__(
        self,
        contents: dict[str, bytes],
        listed: Sequence[StoredArtifact] | None = None,
        bring: Callable[[Path], Path] | None = None,
    ) -> None:
        self.contents = contents
        self.listed = listed
        self.bring = bring
        self.asked: list[str] = []

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        self.asked.append(run_id)
        if self.listed is not None:
            return list(self.listed)
        return [stored(name, size=len(content)) for name, content in self.contents.items()]

    def fetch(
        self,
        run_id: str,
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        self.asked.append(run_id)
        path = directory / artifact.name
        if self.bring is not None:
            return self.bring(path)
        content = self.contents[artifact.name]
        progress(len(content))
        path.write_bytes(content)
        return path


def run_with_files(sink: Sink, files: Mapping[tuple[str, str], bytes], folder: Path) -> str:
    """Write files, by kind and name, to ``folder``, store them in the sink's run, and return the run's id."""
    run = sink.open()
    for (kind, name), data in files.items():
        (folder / name).write_bytes(data)
        artifact = Artifact(1, name, kind, f"artifacts/{name}", len(data))
        sink.log_artifact(artifact, folder / name)
    sink.close("finished")
    return run.run_id


@contextmanager
def moved_away(folder: Path) -> Iterator[None]:
    """Make a tracker's folder unreachable, as a disk that is not mounted."""
    away = folder.rename(folder.with_name("away"))
    try:
        yield
    finally:
        away.rename(folder)
