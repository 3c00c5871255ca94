"""``memlog pull`` against real MLflow stores: what a trainer saved comes back, to any machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support import child
from support.flamegraphs import document
from support.mlflow_server import (
    MlflowServer,
    answering_server,
    environment_without_mlflow,
    free_port,
    running_mlflow_server,
    sqlite_store,
)

from memlog.errors import DeliveryError, TrackerUnavailableError, UnknownRunError
from memlog.sink import Connection
from memlog_mlflow import backend

pytestmark = pytest.mark.integration

TRAIN = """
    import sys
    import memlog

    with memlog.init("mlflow", finish_timeout=120) as session:
        session.step()
        session.save_artifact("graph.json", kind="flamegraph", name="peak.speedscope.json")
        session.save_artifact("large.bin", kind="snapshot")
"""
LARGE = bytes(range(256)) * 12_000
"""Content of a file that is larger than a part that MLflow's client downloads at a time."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with running_mlflow_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    with environment_without_mlflow():
        yield


def trained(folder: Path, uri: str) -> str:
    """Train and save two files; return the id of MLflow's run."""
    (folder / "graph.json").write_text(json.dumps(document()))
    (folder / "large.bin").write_bytes(LARGE)
    child.run(TRAIN, folder, MLFLOW_TRACKING_URI=uri)
    client = MlflowClient(uri)
    experiments = [found.experiment_id for found in client.search_experiments()]
    [run] = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    return str(run.info.run_id)


def assert_all_is_back(folder: Path, printed: str) -> None:
    assert (folder / "large.bin").read_bytes() == LARGE
    assert json.loads((folder / "peak.speedscope.json").read_text()) == document()
    names = {path.name for path in folder.iterdir()}
    assert names == {"large.bin", "peak.speedscope.json", "report.html"}
    assert "2.9 MiB" in printed
    assert printed.splitlines()[-1] == f"look at it: memlog open {folder.name}/peak.speedscope.json"


def test_files_come_back_here_and_on_a_machine_without_a_journal(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run_id = trained(here, server.url)
    # memlog looks for a run of this machine where it was delivered, whatever the environment says.
    printed = child.memlog("pull", "latest", "--backend", "mlflow", "-o", "back", directory=here)
    assert_all_is_back(here / "back", printed)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    printed = child.memlog("pull", run_id, "--backend", "mlflow", "-o", "back", directory=there)
    assert_all_is_back(there / "back", printed)
    assert not (there / "memlog_runs").exists()


def test_an_unknown_run_is_an_error_with_the_remedy(server: MlflowServer) -> None:
    store = backend.open_store(Connection(uri=server.url))
    for name in ("0" * 32, "no such run", "../x"):
        with pytest.raises(UnknownRunError, match="set MLFLOW_TRACKING_URI"):
            store.list_artifacts(name)


def test_files_of_the_users_are_not_listed(tmp_path: Path, server: MlflowServer) -> None:
    client = MlflowClient(server.url)
    run_id = client.create_run("0").info.run_id
    (tmp_path / "model.bin").write_bytes(b"model")
    for folder in (None, "memlog", "memlog/artifacts", "memlog/artifacts/a/b"):
        client.log_artifact(run_id, str(tmp_path / "model.bin"), folder)
    client.log_artifact(run_id, str(tmp_path / "model.bin"), "memlog/artifacts/report")
    [found] = backend.open_store(Connection(uri=server.url)).list_artifacts(run_id)
    assert (found.name, found.kind, found.size) == ("model.bin", "report", 5)


def test_a_missing_store_is_reported_and_not_created(tmp_path: Path) -> None:
    for uri in (f"sqlite:///{tmp_path}/none.db", f"{tmp_path}/none", f"file://{tmp_path}/none"):
        with pytest.raises(TrackerUnavailableError, match="there is no MLflow store at"):
            backend.open_store(Connection(uri=uri)).list_artifacts("0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_server_in_trouble_is_unavailable() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TrackerUnavailableError):
        backend.open_store(Connection(uri=url)).list_artifacts("0" * 32)
    with answering_server() as answering:
        for status in (500, 401):
            answering.status = status
            with pytest.raises(TrackerUnavailableError):
                backend.open_store(Connection(uri=answering.url)).list_artifacts("0" * 32)


def test_progress_is_reported_and_a_vanished_file_is_an_error_of_the_tracker(
    tmp_path: Path,
) -> None:
    uri = sqlite_store(tmp_path)
    client = MlflowClient(uri)
    experiment = client.create_experiment("p", artifact_location=(tmp_path / "files").as_uri())
    run = client.create_run(experiment).info
    for name in ("here.bin", "gone.bin"):
        (tmp_path / name).write_bytes(LARGE)
        client.log_artifact(run.run_id, str(tmp_path / name), "memlog/artifacts/snapshot")
    store = backend.open_store(Connection(uri=uri))
    gone, here = sorted(store.list_artifacts(run.run_id), key=lambda found: found.name)
    [stored] = (tmp_path / "files").rglob("gone.bin")
    stored.unlink()
    target = tmp_path / "target"
    target.mkdir()
    arrived: list[int] = []
    came = store.fetch(run.run_id, here, target, arrived.append)
    assert came.read_bytes() == LARGE
    assert sum(arrived) == len(LARGE)
    with pytest.raises(DeliveryError, match="MLflow"):
        store.fetch(run.run_id, gone, target, arrived.append)
