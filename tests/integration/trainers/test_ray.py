"""Ray Train's workers, each recorded, in a real cluster of this machine, with the real MLflow."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import page_programs
from support.launching import Recorded, recorded
from support.mlflow_server import sqlite_store
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

from memlog.events import Phase

pytest.importorskip("ray.train")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1300),  # the first test waits for the trainings
]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "train-with-ray.md"
DRIVER = """
    import os
    import runpy
    import tempfile
    from pathlib import Path

    import mlflow
    import ray
    import ray.train
    import torch
    from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    HERE = Path.cwd()
    STORE = os.environ["STORE"]

    def train(log=lambda *_, step: None):
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log("loss", step, step=step)

    def fails_at_first():
        if not (HERE / "failed").exists():
            (HERE / "failed").touch()
            train()
            raise RuntimeError("a fault of the user's")
        mlflow.set_tracking_uri(STORE)
        with mlflow.start_run(run_name="of the loop"):
            train(mlflow.log_metric)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "weights").write_text("learnt")
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))

    if __name__ == "__main__":
        ray.init(num_cpus=2, include_dashboard=False, address="local", _temp_dir=os.environ["RAY_FOLDER"])
        # After the cluster has begun, so that workers have these variables from the driver alone.
        mlflow.set_tracking_uri(STORE)
        os.environ["RAY_TRAIN_CALLBACKS"] = "memlog_ray.MemlogCallback"
        os.environ["MEMLOG_BACKEND"] = "mlflow"
        DataParallelTrainer(
            fails_at_first,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="twice",
                storage_path=str(HERE / "results"),
                failure_config=FailureConfig(max_failures=1),
            ),
        ).fit()
        del os.environ["RAY_TRAIN_CALLBACKS"], os.environ["MEMLOG_BACKEND"]
        runpy.run_path(os.environ["PAGE"], run_name="__main__")
        ray.shutdown()
"""


class Trained:
    """Results of the driver.

    Attributes:
        store: MLflow's address.
        runs: All runs of memlog, the oldest first.
    """

    def __init__(self, folder: Path, store: str) -> None:
        from mlflow import MlflowClient

        self.store = store
        self.folder = folder / "memlog_runs"
        self.runs = recorded(self.folder)
        self.client = MlflowClient(store)

    def named(self, name: str) -> list[Recorded]:
        """Return the runs whose names begin with ``name``. Names of ranks above 0 may end with the rank."""
        return [run for run in self.runs if (run.name or "").startswith(name)]

    def shown(self, name: str) -> list[Any]:
        """The tracker's runs with this name, the oldest first."""
        experiments = [each.experiment_id for each in self.client.search_experiments()]
        found = self.client.search_runs(experiments, order_by=["attributes.start_time ASC"])
        return [run for run in found if run.info.run_name == name]

    def rows(self, shown: Any) -> Any:
        """Return memlog's rows in the tracker for one of its runs."""
        return rows_in_mlflow(self.store, shown.info.run_id)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """One cluster and one driver, whose two trainings take most of this file's time."""
    folder = tmp_path_factory.mktemp("driver")
    store = sqlite_store(folder)
    script = folder / "train.py"
    script.write_text(textwrap.dedent(DRIVER))
    [example] = page_programs.steps(PAGE)
    (folder / "page.py").write_text(example.code)
    ours = ("MLFLOW_", "MEMLOG_", "RAY_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # Short: the paths of sockets are at most 107 characters long.
    rays = tempfile.mkdtemp(prefix="memlog-ray-", dir="/tmp")
    environment = {
        **inherited,
        "HOME": rays,  # for the cluster's token
        "PAGE": str(folder / "page.py"),
        "RAY_FOLDER": rays,
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "STORE": store,
    }
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        runs = folder / "memlog_runs"
        for run in recorded(runs):
            if run.parameters.get("rank", "0") == "0":  # other ranks deliver nothing
                wait_until_delivered(runs, run_id=run.directory.id)
        _wait_for_the_end_of_all(folder, rays)
        yield Trained(folder, store)
    finally:
        shutil.rmtree(rays, ignore_errors=True)


def _wait_for_the_end_of_all(*folders: str | Path) -> None:
    """Wait until all processes that the driver started have ended. Fail after a minute."""
    deadline = time.monotonic() + 60
    while left := [each for each in psutil.process_iter() if _names_one(each, folders)]:
        assert time.monotonic() < deadline, [each.cmdline() for each in left]
        time.sleep(0.1)


def _names_one(process: psutil.Process, folders: tuple[str | Path, ...]) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(str(folder) in line for folder in folders)


def test_with_the_variable_alone_each_attempt_is_recorded_to_its_end(trained: Trained) -> None:
    first, second = trained.named("twice")
    assert [first.steps, second.steps] == [list(range(6))] * 2
    assert [first.status, second.status] == ["failed", "finished"]


def test_a_run_that_memlog_opens_ends_as_the_killed_worker_did(trained: Trained) -> None:
    first, _ = trained.named("twice")
    [shown] = trained.shown("twice")
    assert shown.info.status == "FAILED"
    assert shown.info.end_time is not None
    assert trained.rows(shown) == rows_of(plan_of(first.directory))


def test_the_loops_own_run_is_joined(trained: Trained) -> None:
    [shown] = trained.shown("of the loop")
    assert shown.info.status == "FINISHED"
    losses = trained.client.get_metric_history(shown.info.run_id, "loss")
    assert [(row.step, row.value) for row in losses] == [(step, step) for step in range(6)]
    _, second = trained.named("twice")
    assert trained.rows(shown) == rows_of(plan_of(second.directory))
    assert [event.label for event in second.events if isinstance(event, Phase)] == ["checkpoint"]


def test_workers_of_the_page_join_the_run_that_is_open_around_fit(trained: Trained) -> None:
    [shown] = trained.shown("with memory")
    assert shown.info.status == "FINISHED"
    ranks = {run.parameters["rank"]: run for run in trained.named("linear")}
    assert sorted(ranks) == ["0", "1"]
    for run in ranks.values():
        assert run.parameters["world_size"] == "2"
        assert run.steps == list(range(40))
        assert run.status == "finished"
    assert trained.rows(shown) == rows_of(plan_of(ranks["0"].directory))


def test_no_other_run_is_opened(trained: Trained) -> None:
    assert len(trained.runs) == 4
    experiments = [each.experiment_id for each in trained.client.search_experiments()]
    assert len(trained.client.search_runs(experiments)) == 3
