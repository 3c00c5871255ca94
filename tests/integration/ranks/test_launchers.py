"""Ranks as plain processes, with the environment variables that a scheduler sets."""

import os
import subprocess
from pathlib import Path

import pytest
from support import child
from support.mlflow_server import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

KUBEFLOW = {
    "HOSTNAME": "gpt-{pod}-0",
    "RANK": "{rank}",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "gpt-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "{rank}",
    "PET_MASTER_ADDR": "gpt-master-0",
    "PET_MASTER_PORT": "23456",
}
"""Variables that the training operator sets in the pods of a PyTorchJob with a master and a worker.

tests/unit/ranks/test_ranks.py has the variables of other launchers.
"""


def start(folder: Path, rank: int, address: str, **variables: str) -> "subprocess.Popen[str]":
    own = {
        name: value.format(rank=rank, pod="worker" if rank else "master")
        for name, value in variables.items()
    }
    return child.start_program(
        folder / "train.py",
        *(str(rank), address),
        directory=folder,
        environment={**os.environ, "OMP_NUM_THREADS": "1", **own},
        stderr=subprocess.PIPE,
    )


ALONE = """
import mlflow, torch, memlog

memlog.init("mlflow")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
memlog.finish()
"""


def test_a_rank_that_sees_no_lower_one_opens_no_run(tmp_path: Path, ready_store: str) -> None:
    """The rank has its own pod. Rank 0 may record in a folder of another pod."""
    (tmp_path / "train.py").write_text(ALONE, encoding="utf-8")
    variables = {**KUBEFLOW, "MLFLOW_TRACKING_URI": ready_store}
    process = start(tmp_path, 1, "", **variables)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"memlog: rank 1 finds no run of a lower rank in {tmp_path}/" in errors
    from mlflow import MlflowClient

    assert MlflowClient(ready_store).search_runs(["0"]) == []


REFUSED = """
import os, time
from pathlib import Path
import mlflow, torch, memlog

rank = int(os.environ["RANK"])
run = mlflow.start_run() if rank == 0 else None
memlog.init("mlflow")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
if run is None:
    while not Path("finished").exists():
        time.sleep(0.05)
else:
    while len({file.parent for file in Path("memlog_runs").glob("*/helper-*.jsonl")}) < 2:
        time.sleep(0.05)  # until both ranks have a helper process
    mlflow.end_run()
    mlflow.MlflowClient().delete_run(run.info.run_id)
memlog.finish()
Path("finished").touch()
"""


def test_finish_says_what_is_refused_while_other_ranks_go_on(
    tmp_path: Path, ready_store: str
) -> None:
    (tmp_path / "train.py").write_text(REFUSED, encoding="utf-8")
    variables = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"MLFLOW_TRACKING_URI": ready_store}
    started = [start(tmp_path, rank, "", **variables) for rank in range(2)]
    errors = [process.communicate(timeout=180)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert "memlog: mlflow: " in errors[0], errors[0]
    assert "deleted" in errors[0]
