"""In each tracker run, memlog's steps start at that run's start, like the user's own steps."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child
from support.wandb_file import find_runs, read_run

from memlog.cli.main import cli

pytestmark = pytest.mark.integration

LOOP = """
    import mlflow
    import torch

    import memlog

    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train(log, steps=20):
        for step in range(steps):
            weight.sum().backward()
            optimizer.step()
            log("loss", 1.0 + step, step=step)
"""


def steps_in(directory: Path, name: str) -> dict[str, list[int]]:
    """Steps of memlog's memory and of the user's loss in each run, by the run's name."""
    from mlflow import MlflowClient

    client: MlflowClient = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    return {
        run.info.run_name: [
            point.step for point in client.get_metric_history(run.info.run_id, name)
        ]
        for run in client.search_runs(["0"])
    }


@pytest.mark.usefixtures("ready_store")
def test_an_unchanged_loop_of_three_runs_overlays(tmp_path: Path) -> None:
    child.run(
        LOOP
        + """
    memlog.init("mlflow", alerts="host.rss > 1 MiB", finish_timeout=120)
    for sweep in range(3):
        with mlflow.start_run(run_name=f"sweep-{sweep}"):
            train(mlflow.log_metric)
    memlog.finish()
    """,
        tmp_path,
    )
    every = {f"sweep-{sweep}": list(range(20)) for sweep in range(3)}
    assert steps_in(tmp_path, "loss") == every
    assert steps_in(tmp_path, "memory/host/rss_mib") == every
    assert steps_in(tmp_path, "memory/step/alert")["sweep-0"] == [0]

    shown = CliRunner().invoke(
        cli, ["show", "latest", "--all", "--dir", str(tmp_path / "memlog_runs")]
    )
    assert "60 steps" in shown.output
    assert "its step 0 is step 20 here" in shown.output
    assert "its step 0 is step 40 here" in shown.output


@pytest.mark.usefixtures("ready_store")
def test_the_first_run_counts_from_initial_step_and_a_returning_one_goes_on(tmp_path: Path) -> None:
    child.run(
        LOOP
        + """
    memlog.init("mlflow", initial_step=100, every=2, finish_timeout=120)
    with mlflow.start_run(run_name="parent"):
        train(mlflow.log_metric, 3)
        with mlflow.start_run(run_name="child", nested=True):
            train(mlflow.log_metric, 5)
        train(mlflow.log_metric, 2)
    memlog.finish()
    """,
        tmp_path,
    )
    assert steps_in(tmp_path, "memory/host/rss_mib") == {
        "parent": [100, 102, 108],
        "child": [0, 2, 4],
    }


@pytest.mark.usefixtures("ready_store")
def test_a_trainers_numbers_are_the_steps_of_runs_that_loggers_hold(tmp_path: Path) -> None:
    child.run(
        LOOP
        + """
    session = memlog.init("mlflow", finish_timeout=120)
    client = mlflow.MlflowClient()
    session.claim_steps()
    for name, numbers in (("first", (1, 2, 3)), ("second", (1, 2, 5)), ("resumed", (50, 51))):
        run = client.create_run("0", run_name=name)
        for _ in range(2):
            session.join_run("mlflow", run.info.run_id, name=name)
        with memlog.phase("validation"):
            pass
        for number in numbers:
            session.step(number)
    with mlflow.start_run(run_name="opened"):
        session.step()
    memlog.finish()
    """,
        tmp_path,
    )
    assert steps_in(tmp_path, "memory/host/rss_mib") == {
        "first": [1, 2, 3],
        "second": [1, 2, 5],
        "resumed": [50, 51],
        "opened": [0],
    }
    validated = steps_in(tmp_path, "memory/phase/validation/host/rss_mib")
    assert {name: len(steps) for name, steps in validated.items()} == {
        "first": 1, "second": 1, "resumed": 1, "opened": 0,
    }  # fmt: skip


def test_runs_of_wandb_overlay_too(tmp_path: Path) -> None:
    child.run(
        """
    import torch
    import wandb

    import memlog

    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    memlog.init("wandb")
    for sweep in range(3):
        with wandb.init(project="p", mode="offline", name=f"sweep-{sweep}") as run:
            for step in range(20):
                weight.sum().backward()
                optimizer.step()
                run.log({"loss": 1.0 + step}, step=step)
    memlog.finish()
    """,
        tmp_path,
    )
    for path in find_runs(tmp_path):
        run = read_run(path)
        assert [row["loss"] for row in run.users_rows()] == [1.0 + step for step in range(20)]
        mine = [row["memlog/step"] for row in run.memlogs_rows() if "memory/host/rss_mib" in row]
        assert mine == list(range(20))
