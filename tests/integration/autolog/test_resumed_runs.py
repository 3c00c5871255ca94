"""A tracker's run that a second job resumes: memlog's steps go on after those of the first job."""

from pathlib import Path

import pytest
from support import child
from support.event_files import events_in
from support.trackio_server import offline
from support.wandb_file import find_runs, read_run
from support.wandb_server import WandbServer

pytestmark = pytest.mark.integration

RSS = "memory/host/rss_mib"
LOOP = """
    import sys
    import torch
    import memlog
    TRACKER
    FIRST = int(sys.argv[1])
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train(log, first=FIRST, steps=10):
        for step in range(first, first + steps):
            weight.sum().backward()
            optimizer.step()
            log(step)
"""


def train(directory: Path, script: str, *firsts: int, **environment: str) -> str:
    """Run one job for each first step of the user's, and return what the last job prints to stderr.

    The script begins with the import of its tracker.
    """
    errors, (_, tracker, rest) = "", script.split("\n", 2)
    for first in firsts:
        process = child.start(
            LOOP.replace("TRACKER", tracker.strip()) + rest, directory, str(first), **environment
        )
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    return errors


@pytest.mark.usefixtures("ready_store")
@pytest.mark.parametrize(
    ("arguments", "second"), [("", range(10, 20)), ("initial_step=FIRST", range(30, 40))]
)
def test_mlflow(tmp_path: Path, arguments: str, second: range) -> None:
    """The second job begins at 30. Without ``initial_step``, its steps follow those that the run has."""
    train(
        tmp_path,
        f"""
    import mlflow
    client = mlflow.MlflowClient()
    known = [run.info.run_id for run in client.search_runs(["0"])]
    with mlflow.start_run(run_id=known[0] if known else None):
        memlog.init("mlflow", finish_timeout=120, {arguments})
        train(lambda step: mlflow.log_metric("loss", 1.0, step=step))
        memlog.finish()
    """,
        0,
        30,
    )
    from mlflow import MlflowClient

    client: MlflowClient = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs(["0"])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, RSS)]
    assert steps == [*range(10), *second]


@pytest.mark.usefixtures("ready_store")
def test_mlflow_after_a_job_without_memlog(tmp_path: Path) -> None:
    """The first job's metrics tell where the second one begins."""
    train(
        tmp_path,
        """
    import mlflow
    client = mlflow.MlflowClient()
    known = [run.info.run_id for run in client.search_runs(["0"])]
    with mlflow.start_run(run_id=known[0] if known else None):
        if known:
            memlog.init("mlflow", finish_timeout=120)
        mlflow.log_metric("system/cpu_utilization_percentage", 50.0, step=500)
        train(lambda step: mlflow.log_metric("loss", 1.0, step=step))
        if known:
            memlog.finish()
    """,
        0,
        10,
    )
    from mlflow import MlflowClient

    client: MlflowClient = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs(["0"])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, RSS)]
    assert steps == list(range(10, 20))


@pytest.mark.usefixtures("ready_store")
def test_two_sessions_of_one_process_and_the_same_open_run(tmp_path: Path) -> None:
    train(
        tmp_path,
        """
    import mlflow
    with mlflow.start_run():
        for _ in range(3):
            memlog.init("mlflow", finish_timeout=120)
            train(lambda step: None, steps=4)
            memlog.finish()
    """,
        0,
    )
    from mlflow import MlflowClient

    client: MlflowClient = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs(["0"])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, RSS)]
    assert steps == list(range(12))


@pytest.mark.parametrize("arguments", ["", ", purge_step=FIRST or None"])
def test_tensorboard(tmp_path: Path, arguments: str) -> None:
    train(
        tmp_path,
        f"""
    from torch.utils.tensorboard import SummaryWriter
    memlog.init("tensorboard", finish_timeout=120)
    writer = SummaryWriter("tb"{arguments})
    train(lambda step: writer.add_scalar("loss", 1.0, step))
    writer.close()
    memlog.finish()
    """,
        0,
        10,
        20,
    )
    events = events_in(tmp_path / "tb")
    assert [event.step for event in events.Scalars("loss")] == list(range(30))
    assert [event.step for event in events.Scalars(RSS)] == list(range(30))
    own = [file.read_bytes() for file in (tmp_path / "tb").glob("*memlog-*")]
    child.memlog(
        "sync", "latest", directory=tmp_path
    )  # finds the moved file, and writes nothing twice
    assert [file.read_bytes() for file in (tmp_path / "tb").glob("*memlog-*")] == own


def test_tensorboard_after_a_job_without_memlog(tmp_path: Path) -> None:
    train(
        tmp_path,
        """
    from torch.utils.tensorboard import SummaryWriter
    if FIRST:
        memlog.init("tensorboard", finish_timeout=120)
    writer = SummaryWriter("tb")
    writer.add_scalar("rate", 1.0, FIRST)
    train(lambda step: writer.add_scalar("loss", 1.0, step))
    writer.close()
    if FIRST:
        memlog.finish()
    """,
        0,
        10,
    )
    events = events_in(tmp_path / "tb")
    assert [event.step for event in events.Scalars(RSS)] == list(range(10, 20))


def test_trackio(tmp_path: Path) -> None:
    train(
        tmp_path,
        """
    import trackio
    run = trackio.init(project="p", name="r", resume="allow", auto_log_cpu=False)
    memlog.init("trackio", finish_timeout=120)
    train(lambda step: trackio.log({"loss": 1.0}, step=step))
    trackio.finish()
    memlog.finish()
    import json
    from trackio.sqlite_storage import SQLiteStorage
    logs = SQLiteStorage.get_logs("p", "r")
    json.dump([log["step"] for log in logs if "memory/host/rss_mib" in log], open("steps", "w"))
    """,
        0,
        10,
        **offline(TRACKIO_DIR=str(tmp_path / "trackio")),
    )
    import json

    assert json.loads((tmp_path / "steps").read_text()) == list(range(20))


WANDB = """
    import wandb
    memlog.init("wandb", finish_timeout=60)
    run = wandb.init(project="p", id="again", ARGUMENTS)
    train(lambda step: run.log({"loss": 1.0}, LOG))
    run.finish()
    memlog.finish()
"""


@pytest.mark.parametrize("log", ["step=step", "commit=True"])
def test_wandb_online(tmp_path: Path, log: str) -> None:
    with WandbServer() as server:
        script = WANDB.replace("ARGUMENTS", "resume='allow'").replace("LOG", log)
        train(tmp_path, script, 0, 10, **server.environment)
        rows = server.runs["again"].rows
    assert [row["memlog/step"] for row in rows if "loss" in row] == list(range(20))


def wandb_offline(directory: Path, arguments: str, log: str) -> tuple[list[list[int]], str]:
    """Return memlog's steps in the user's rows of two jobs, and what the second job has printed."""
    script = WANDB.replace("ARGUMENTS", f"mode='offline', {arguments}").replace("LOG", log)
    errors = train(directory, script, 0, 10)
    runs = [read_run(file) for file in find_runs(directory)]
    steps = [[row["memlog/step"] for row in run.rows if "loss" in row] for run in runs]
    return steps, errors


@pytest.mark.parametrize("arguments", ["resume='allow'", ""])
def test_wandb_offline_takes_the_users_numbers(tmp_path: Path, arguments: str) -> None:
    steps, errors = wandb_offline(tmp_path, arguments, "step=step")
    assert steps == [list(range(10)), list(range(10, 20))]
    assert "initial_step" not in errors


def test_wandb_offline_without_numbers_names_initial_step(tmp_path: Path) -> None:
    steps, errors = wandb_offline(tmp_path, "resume='must'", "commit=True")
    assert steps == [list(range(10))] * 2
    assert errors.count("pass initial_step=N to memlog.init()") == 1
