"""Threads that train at the same time, each with runs of its own in MLflow, as Optuna's ``n_jobs`` does."""

from pathlib import Path

import pytest
from support import child

pytestmark = pytest.mark.integration

RSS = "memory/host/rss_mib"


@pytest.mark.usefixtures("ready_store")
@pytest.mark.parametrize("pause", [0.0, 0.003])
def test_each_run_has_its_own_steps(tmp_path: Path, pause: float) -> None:
    lengths = [10, 40, 25, 15, 30, 5]
    child.run(
        f"""
    import threading
    import time

    import mlflow
    import torch

    import memlog

    trials = list(enumerate({lengths}))
    memlog.init("mlflow", finish_timeout=120)

    def work():
        while trials:
            number, steps = trials.pop()
            with mlflow.start_run(run_name=f"trial {{number}}"):
                optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
                for _ in range(steps):
                    time.sleep({pause})
                    optimizer.step()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memlog.finish()
    """,
        tmp_path,
    )
    from mlflow import MlflowClient

    client: MlflowClient = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = {
        run.info.run_name: [
            (point.step, point.value > 10)
            for point in client.get_metric_history(run.info.run_id, RSS)
        ]
        for run in client.search_runs(["0"])
    }
    assert {name: sorted(points) for name, points in found.items()} == {
        f"trial {number}": [(step, True) for step in range(steps)]
        for number, steps in enumerate(lengths)
    }


@pytest.mark.usefixtures("ready_store")
def test_threads_without_a_run_of_their_own_belong_to_the_main_threads(tmp_path: Path) -> None:
    child.run(
        """
    import threading

    import mlflow
    import torch

    import memlog

    memlog.init("mlflow", finish_timeout=120)

    def work():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for _ in range(20):
            optimizer.step()

    with mlflow.start_run(run_name="of main"):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    memlog.finish()
    """,
        tmp_path,
    )
    from mlflow import MlflowClient

    client: MlflowClient = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs(["0"])
    assert run.info.run_name == "of main"
    assert len(client.get_metric_history(run.info.run_id, RSS)) >= 20
