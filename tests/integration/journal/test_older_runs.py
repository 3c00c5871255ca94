"""Journals and stores of older code give the same documents, points, rows and files."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from support import child
from support.mlflow_server import sqlite_store
from support.wandb_file import read_only_run

pytestmark = pytest.mark.integration
WRITTEN = Path(__file__).parents[2] / "data" / "runs-of-0.1"
FIRST, SECOND = "jkpf99jq", "vnnbfssx"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "runs", tmp_path / "memlog_runs")
    return tmp_path


def expected(name: str) -> Any:
    return json.loads((WRITTEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("run", [FIRST, SECOND])
def test_show_gives_the_same_document(runs: Path, run: str) -> None:
    document = json.loads(child.memlog("show", run, "--json", directory=runs))
    del document["run"]["directory"]  # the folder of the copy
    assert document.pop("findings") == []  # newer code has added these four keys
    assert document.pop("phases") == {}
    assert document.pop("largest_step") is None
    assert document.pop("verdict").startswith(("No growth", "Too few steps"))
    assert document == expected(f"show-{run}")


def test_compare_gives_the_same_document(runs: Path) -> None:
    document = json.loads(child.memlog("compare", FIRST, SECOND, "--json", directory=runs))
    assert document == expected("compare")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, about mlflow's classes
def test_sync_gives_the_same_points(runs: Path) -> None:
    address = sqlite_store(runs)
    child.memlog(*("sync", FIRST, "--to", "mlflow"), directory=runs, MLFLOW_TRACKING_URI=address)
    client = client_of(runs)
    run = only_run(client)
    synced = {"metrics": points_of(client, run), "params": dict(run.data.params)}
    assert synced == expected("points")


@pytest.fixture
def stored(runs: Path) -> Path:
    """Older runs with their MLflow store and their delivery state, as they were after ``memlog sync``."""
    store = WRITTEN / "mlflow-store"
    shutil.copytree(store / "mlruns", runs / "mlruns")
    delivery = runs / "memlog_runs" / FIRST / "delivery"
    delivery.mkdir()
    with closing(sqlite3.connect(runs / "mlflow.db")) as database:
        database.executescript(with_root(store / "mlflow.sql", runs))
    (delivery / "mlflow.json").write_text(with_root(store / "delivery" / "mlflow.json", runs))
    return runs


def with_root(path: Path, root: Path) -> str:
    return path.read_text(encoding="utf-8").replace("{root}", str(root))


def points_of(client: MlflowClient, run: Any) -> dict[str, list[list[float]]]:
    history = client.get_metric_history
    return {
        name: [[metric.step, metric.value] for metric in history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def only_run(client: MlflowClient) -> Any:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    [run] = client.search_runs(experiments)
    return run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, about mlflow's classes
def test_an_older_store_gives_its_files_and_gets_no_point_twice(stored: Path) -> None:
    client = client_of(stored)
    runs = {FIRST: "by-its-id", only_run(client).info.run_id: "by-mlflows"}
    pulls = [("pull", run, "--backend", "mlflow", "-o", out) for run, out in runs.items()]
    address = {"MLFLOW_TRACKING_URI": f"sqlite:///{stored}/mlflow.db"}
    child.commands(*pulls, ("sync", FIRST, "--to", "mlflow"), directory=stored, **address)
    note = WRITTEN / "runs" / FIRST / "artifacts" / "note.txt"
    for out in runs.values():
        assert (stored / out / "note.txt").read_bytes() == note.read_bytes()
    assert points_of(client, only_run(client)) == expected("points")["metrics"]


def client_of(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def test_sync_gives_wandb_the_same_rows(runs: Path) -> None:
    child.memlog("sync", SECOND, "--to", "wandb", directory=runs, WANDB_MODE="offline")
    run = read_only_run(runs / "wandb")
    rows = [{name: row[name] for name in row if name != "_runtime"} for row in run.rows]
    assert {"rows": rows, "alerts": run.alerts, "config": run.config} == expected("wandb")
