"""Contract tests of artifact stores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from memlog.errors import MemlogError, TrackerUnavailableError
from memlog.sink import ArtifactStore, StoredArtifact

FILES: Mapping[tuple[str, str], bytes] = {
    ("flamegraph", "graph.svg"): b"<svg/>",
    ("file", "empty"): b"",
    ("file", "large.bin"): bytes(range(256)) * 8192,
    ("snapshot", "a-b_c.d.pickle"): b"\x80\x04N.",
}
"""Contents of the files that the contract stores in a run, by kind and name."""


class ArtifactStoreContract:
    """Tests that a store does what `memlog.sink.ArtifactStore` describes. The tests use its real tracker.

    Subclasses implement the methods that raise `NotImplementedError`.
    """

    def open_store(self) -> ArtifactStore:
        """Return a new store, as the backend's ``open_store`` does."""
        raise NotImplementedError

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        """Create a run with these files, stored by the sink; return the tracker's id of the run."""
        raise NotImplementedError

    def unknown_run(self) -> str:
        """Return an id that no run in the tracker has."""
        raise NotImplementedError

    def down(self) -> AbstractContextManager[object]:
        """Return a context manager during which the tracker can't be reached."""
        raise NotImplementedError

    def test_every_file_is_told_by_name_kind_and_size(self) -> None:
        """Sizes may be unknown, but are never wrong."""
        listed = self.open_store().list_artifacts(self.run_with(FILES))
        assert sorted((one.kind, one.name) for one in listed) == sorted(FILES)
        assert all(one.size in (None, len(FILES[one.kind, one.name])) for one in listed)

    def test_a_run_without_files_has_none(self) -> None:
        """An empty list is not an error."""
        assert self.open_store().list_artifacts(self.run_with({})) == []

    def test_every_file_comes_back_as_it_was(self, tmp_path: Path) -> None:
        """A fetched file has the name and the content of the stored file. A second fetch gives the same."""
        run, store = self.run_with(FILES), self.open_store()
        for attempt in range(2):
            for number, artifact in enumerate(store.list_artifacts(run)):
                folder = tmp_path / f"{attempt}-{number}"
                folder.mkdir()
                received: list[int] = []
                path = store.fetch(run, artifact, folder, received.append)
                assert path == folder / artifact.name
                assert path.read_bytes() == FILES[artifact.kind, artifact.name]
                assert sum(received) in (0, path.stat().st_size)
                assert list(folder.iterdir()) == [path]

    def test_nothing_is_written_elsewhere(self, tmp_path: Path) -> None:
        """A name that leads out of the folder is refused, even if the tracker returns it."""
        run, store = self.run_with(FILES), self.open_store()
        folder = tmp_path / "deep" / "folder"
        folder.mkdir(parents=True)
        for name in ("../out", "/tmp/out", "..", "a/../../out", "", "a\0b"):  # noqa: S108 - to be refused
            artifact = StoredArtifact(name, "file", 1)
            assert isinstance(_error(store, run, artifact, folder), (MemlogError, ValueError))
        assert list(tmp_path.rglob("*")) == [tmp_path / "deep", folder]

    def test_a_missing_run_is_an_error(self) -> None:
        """An empty list would hide a mistyped id."""
        try:
            self.open_store().list_artifacts(self.unknown_run())
        except MemlogError:
            return
        raise AssertionError("a missing run is listed as a run without files")

    def test_an_unreachable_tracker_is_an_error_until_it_is_back(self, tmp_path: Path) -> None:
        """The error allows another attempt. An attempt after the outage succeeds. No partial file is left."""
        run, store = self.run_with(FILES), self.open_store()
        artifacts = store.list_artifacts(run)
        folder = tmp_path / "fetched"
        folder.mkdir()
        with self.down():
            assert isinstance(_error(store, run, artifacts[0], folder), TrackerUnavailableError)
            for tried in (store, self.open_store()):  # with and without an earlier connection
                assert _listed(tried, run) in (None, artifacts)
        assert list(folder.iterdir()) == []
        assert store.list_artifacts(run) == artifacts
        assert store.fetch(run, artifacts[0], folder, lambda _: None).exists()


def _listed(store: ArtifactStore, run: str) -> list[StoredArtifact] | None:
    """Return the files of a run; ``None`` if the store reports that the tracker can't be reached."""
    try:
        return store.list_artifacts(run)
    except TrackerUnavailableError:
        return None


def _error(
    store: ArtifactStore, run: str, artifact: StoredArtifact, folder: Path
) -> Exception | None:
    try:
        store.fetch(run, artifact, folder, lambda _: None)
    except Exception as error:  # noqa: BLE001 - the test checks its type
        return error
    return None
