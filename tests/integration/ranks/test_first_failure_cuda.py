"""A rank that runs out of memory on its own device, below torchrun."""

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import devices
from support.launching import launch, recorded, write
from support.shared_runs import told_by_all, wait_until_over

from memlog.cli.main import cli
from memlog.events import Artifact
from memlog.journal import RunDirectory

pytestmark = [pytest.mark.integration, pytest.mark.cuda]

TRAIN = """
    import os

    import torch
    import torch.distributed as dist

    import memlog

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(device)
    memlog.init("local", model=model, layers=True)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters())
    batch, kept = torch.ones(64, 512, device=device), []
    for step in range(40):
        parallel(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            kept.append(torch.ones(32, 1024, 1024, device=device))
"""


def test_a_rank_that_fills_its_device_is_the_runs_first_line(tmp_path: Path) -> None:
    write(tmp_path, TRAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*torchrun, "--nproc-per-node", "2", "train.py")
    small = {"FAKE_CUDA_MEMORY": "2GiB", **devices.need_two()}
    launch(tmp_path, *command, options=("--backend", "local"), code=None, **small)
    runs = {
        int(run.parameters["rank"]): run.directory for run in recorded(tmp_path / "memlog_runs")
    }
    wait_until_over(runs[0])

    told = told_by_all(runs[0])
    assert told.verdict.startswith("Rank 1 ran out of memory on cuda1 after step "), told.verdict
    assert ", 128.0 MiB requested" in told.verdict
    assert told.status == "failed"
    [title] = told.alerts
    assert told.verdict.startswith(title)
    assert told.summary.failed_rank is not None
    assert told.summary.failed_rank.run == runs[1].id
    report = (runs[0].artifacts / "postmortem.md").read_text()
    assert report.startswith(f"# {title}\n")
    files = {name for name in names_of(runs[0]) if name.startswith("rank1-")}
    assert "rank1-out-of-memory.pickle" in files
    named = set(re.findall(r"`([\w.-]*(?:out-of-memory|worst-step)[\w.-]*)`", report))
    assert named
    assert named <= files
    assert (runs[0].artifacts / "rank1-out-of-memory.pickle").read_bytes() == (
        runs[1].artifacts / "out-of-memory.pickle"
    ).read_bytes()

    advice = CliRunner().invoke(
        cli, ["advise", runs[0].id, "--dir", str(runs[0].path.parent)], catch_exceptions=False
    )
    assert advice.output.startswith(f"run {runs[1].id}, step ")


def names_of(run: RunDirectory) -> set[str]:
    return {each.name for each in run.events() if isinstance(each, Artifact)}
