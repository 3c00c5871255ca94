"""An Accelerator's tracker: every rank is recorded, beside the rows of the other trackers."""

from pathlib import Path
from textwrap import dedent

import pytest
from support import child
from support.launching import recorded
from support.mlflow_server import free_port
from support.trainers import mlflow_runs

from memlog.events import Phase

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ready_store")]

PREAMBLE = """
    import accelerate
    import mlflow
    import torch

    import memlog
    from memlog_accelerate import MemlogTracker

    def train(log_with, **options):
        accelerator = accelerate.Accelerator(
            cpu=True, log_with=log_with, gradient_accumulation_steps=2
        )
        accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"memlog": options})
        model = torch.nn.Linear(4, 1)
        data = torch.utils.data.DataLoader(torch.ones(48, 4), batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        step = 0
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.log({"loss": 1 / (step + 1)}, step=step)
                step += 1
        accelerator.save_state("checkpoint")
        accelerator.end_training()
        return accelerator
"""
BY_NAME = """
    import os

    accelerate.tracking.register_tracker_class(MemlogTracker)
    accelerator = train(["mlflow", "memlog"], finish_timeout=60)
    memlog.finish()
    os._exit(0)  # see test_torchrun.py
"""


def run(script: str, folder: Path) -> None:
    child.run(dedent(PREAMBLE) + dedent(script), folder, MLFLOW_DISABLE_TELEMETRY="true")


def test_memory_stands_in_the_other_trackers_run_once_a_step(tmp_path: Path) -> None:
    run('train([MemlogTracker(finish_timeout=60), "mlflow"])', tmp_path)
    (held,) = mlflow_runs(tmp_path)
    assert held.status == "FINISHED"
    assert held.users_rows() == [("loss", step, 1 / (step + 1)) for step in range(6)]
    assert held.steps("memory/host/rss_mib") == list(range(6))
    (recording,) = recorded(tmp_path / "memlog_runs")
    assert (recording.status, recording.steps) == ("finished", list(range(6)))
    assert [one.label for one in recording.events if isinstance(one, Phase)] == ["checkpoint"]


def test_a_session_of_the_script_is_used_and_goes_on_after_the_training(tmp_path: Path) -> None:
    run(
        """
    session = memlog.init("local", initial_step=4)
    accelerator = train(MemlogTracker())
    assert accelerator.get_tracker("memlog", unwrap=True) is session
    assert session.enabled
    """,
        tmp_path,
    )
    (recording,) = recorded(tmp_path / "memlog_runs")
    assert recording.steps == [4, 5, 6, 7, 8, 9]


def test_every_rank_is_recorded_though_trackers_are_made_on_the_first_alone(tmp_path: Path) -> None:
    launched = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "MEMLOG_DIR": str(tmp_path / "memlog_runs"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    script, ranks = dedent(PREAMBLE) + dedent(BY_NAME), []
    for rank in "01":
        (folder := tmp_path / rank).mkdir()
        ranks.append(child.start(script, folder, RANK=rank, LOCAL_RANK=rank, **launched))
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    steps = {run.parameters["rank"]: run.steps for run in recorded(tmp_path / "memlog_runs")}
    assert steps == {"0": [0, 1, 2], "1": [0, 1, 2]}
    (held,) = mlflow_runs(tmp_path)
    assert held.users_rows() == [("loss", step, 1 / (step + 1)) for step in range(3)]
    assert held.steps("memory/host/rss_mib") == [0, 1, 2]
