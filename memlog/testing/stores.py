"""What every store of artifacts must do."""

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
"""By kind and name, what the contract puts into a run."""


class ArtifactStoreContract:
    """Tests that a store keeps the promises of `memlog.sink.ArtifactStore`, against its real tracker.

    Subclasses implement the methods that raise `NotImplementedError`.
    """

    def open_store(self) -> ArtifactStore:
        """A new store, as its backend's ``open_store`` makes it."""
        raise NotImplementedError

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        """Opens a run that holds these files, stored by the sink; returns the tracker's id of it."""
        raise NotImplementedError

    def unknown_run(self) -> str:
        """An id of the tracker's that no run has."""
        raise NotImplementedError

    def down(self) -> AbstractContextManager[object]:
        """While it is entered, the tracker can't be reached."""
        raise NotImplementedError

    def test_every_file_is_told_by_name_kind_and_size(self) -> None:
        """Sizes may be unknown, but are never wrong."""
        told = self.open_store().list_artifacts(self.run_with(FILES))
        assert sorted((one.kind, one.name) for one in told) == sorted(FILES)
        assert all(one.size in (None, len(FILES[one.kind, one.name])) for one in told)

    def test_a_run_without_files_has_none(self) -> None:
        """That is no error."""
        assert self.open_store().list_artifacts(self.run_with({})) == []

    def test_every_file_comes_back_as_it_was(self, tmp_path: Path) -> None:
        """Into the folder that is named, under its own name; and once more the same."""
        run, store = self.run_with(FILES), self.open_store()
        for attempt in range(2):
            for number, artifact in enumerate(store.list_artifacts(run)):
                folder = tmp_path / f"{attempt}-{number}"
                folder.mkdir()
                heard: list[int] = []
                path = store.fetch(run, artifact, folder, heard.append)
                assert path == folder / artifact.name
                assert path.read_bytes() == FILES[artifact.kind, artifact.name]
                assert sum(heard) in (0, path.stat().st_size)
                assert list(folder.iterdir()) == [path]

    def test_nothing_is_written_elsewhere(self, tmp_path: Path) -> None:
        """A name that leads out of the folder is refused, whoever it comes from."""
        run, store = self.run_with(FILES), self.open_store()
        folder = tmp_path / "deep" / "folder"
        folder.mkdir(parents=True)
        for name in ("../out", "/tmp/out", "..", "a/../../out", "", "a\0b"):  # noqa: S108 - to be refused
            artifact = StoredArtifact(name, "file", 1)
            assert isinstance(_error(store, run, artifact, folder), (MemlogError, ValueError))
        assert list(tmp_path.rglob("*")) == [tmp_path / "deep", folder]

    def test_a_run_that_is_not_there_is_said(self) -> None:
        """Not an empty list: the id may be mistyped."""
        try:
            self.open_store().list_artifacts(self.unknown_run())
        except MemlogError:
            return
        raise AssertionError("a run that is not there passes for one without files")

    def test_out_of_reach_it_says_so_and_goes_on_later(self, tmp_path: Path) -> None:
        """The error says that trying again can help; then it does, and nothing half is left."""
        run, store = self.run_with(FILES), self.open_store()
        artifacts = store.list_artifacts(run)
        folder = tmp_path / "fetched"
        folder.mkdir()
        with self.down():
            assert isinstance(_error(store, run, artifacts[0], folder), TrackerUnavailableError)
            for asked in (store, self.open_store()):  # with and without a connection from before
                assert _told(asked, run) in (None, artifacts)
        assert list(folder.iterdir()) == []
        assert store.list_artifacts(run) == artifacts
        assert store.fetch(run, artifacts[0], folder, lambda _: None).exists()


def _told(store: ArtifactStore, run: str) -> list[StoredArtifact] | None:
    """The files of a run, where the store can know them; ``None``: it says that it can't reach them."""
    try:
        return store.list_artifacts(run)
    except TrackerUnavailableError:
        return None


def _error(
    store: ArtifactStore, run: str, artifact: StoredArtifact, folder: Path
) -> Exception | None:
    try:
        store.fetch(run, artifact, folder, lambda _: None)
    except Exception as error:  # noqa: BLE001 - what it raises is what is looked at
        return error
    return None
