"""Folder and server in which tests of the Trackio integration store runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trackio_server import TrackioServer, offline


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a disk with Trackio's folder, and set the folder in trackio, which may be imported already."""
    disk = tmp_path_factory.mktemp("trackio") / "disk"
    folder = disk / "user" / "cache" / "huggingface" / "trackio"
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as process:
        for name, value in offline(TRACKIO_DIR=str(folder)).items():
            process.setenv(name, value)
        modules = ("utils", "sqlite_storage")
        import trackio.sqlite_storage

        for module in modules:
            process.setattr(f"trackio.{module}.TRACKIO_DIR", folder)
        process.setattr(trackio.utils, "ARTIFACTS_DIR", folder / "artifacts")
        yield disk


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackioServer]:
    server = TrackioServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()
