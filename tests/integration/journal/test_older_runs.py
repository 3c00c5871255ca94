"""Journals written before the code was laid out in rooms give the same documents and points as they did."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from support import child

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
    told = json.loads(child.memlog("show", run, "--json", directory=runs))
    del told["run"]["directory"]  # that of the copy
    assert told == expected(f"show-{run}")


def test_compare_gives_the_same_document(runs: Path) -> None:
    told = json.loads(child.memlog("compare", FIRST, SECOND, "--json", directory=runs))
    assert told == expected("compare")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # SQLAlchemy's, of what mlflow declares
def test_sync_gives_the_same_points(runs: Path) -> None:
    address = f"sqlite:///{runs}/mlflow.db"
    child.memlog(*("sync", FIRST, "--to", "mlflow"), directory=runs, MLFLOW_TRACKING_URI=address)
    client = MlflowClient(address)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    [run] = client.search_runs(experiments)
    points = {
        name: [
            [metric.step, metric.value]
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    }
    assert {"metrics": points, "params": dict(run.data.params)} == expected("points")
