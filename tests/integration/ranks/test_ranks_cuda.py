"""Ranks with a device each: DDP below torchrun, FSDP2, and ranks that see only their own device."""

import os
import sys
import textwrap
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from support import child, device_figures, devices
from support.launching import Recorded, launch, recorded, write
from support.mlflow_server import free_port

from memlog.events import Sample

pytestmark = [pytest.mark.integration, pytest.mark.cuda]

TRAIN = (
    device_figures.OWN_FIGURES
    + """
    import time

    import torch.distributed as dist
    def train(how):
        device = torch.device("cuda", 0 if how == "own" else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(device)
        if how == "sharded":
            from torch.distributed.fsdp import fully_shard

            for module in (*model, model):
                fully_shard(module)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(1, 7):
            model(torch.ones(256 * number * (1 + dist.get_rank()), 512, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.5 if how == "own" else 0)   # the helper process samples the devices
        dist.destroy_process_group()
"""
)


def by_rank(folder: Path) -> dict[int, Recorded]:
    runs = {int(run.parameters["rank"]): run for run in recorded(folder / "memlog_runs")}
    assert sorted(runs) == [0, 1]
    return runs


def test_ddp_below_torchrun_has_each_ranks_own_device(tmp_path: Path) -> None:
    write(tmp_path, TRAIN + "\n    train('ddp')\n")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*torchrun, "--nproc-per-node", "2", "train.py")
    launch(tmp_path, *command, **devices.need_two())
    highest = []
    for rank, run in sorted(by_rank(tmp_path).items()):
        steps = device_figures.check_figures(run, tmp_path, rank)
        assert {tuple(one.name for one in step.devices) for step in steps} == {(f"cuda{rank}",)}
        highest.append(max(step.devices[0].peak or 0 for step in steps))
    assert highest[0] < highest[1]  # its batches are larger


def started(folder: Path, how: str, **environment: str) -> dict[int, Recorded]:
    """Train two ranks without a launcher; return their runs by rank."""
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    text = TRAIN + f"\n    import memlog\n    memlog.init('local')\n    train('{how}')\n"
    program = folder / "train.py"
    program.write_text(textwrap.dedent(text))
    processes = []
    for rank in ("0", "1"):
        own = {"CUDA_VISIBLE_DEVICES": rank} if how == "own" else {}
        ranks = {"RANK": rank, "LOCAL_RANK": rank, **own}
        processes.append(
            child.start_program(
                # Written once: a rank that reads its program while it is written again finds an empty one.
                program,
                directory=folder,
                environment={**os.environ, **places, **size, **ranks, **environment},
                **child.PIPES,
            )
        )
    # A rank waits for one that has failed: the failed one's error is the test's.
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(process.communicate, timeout=200) for process in processes]
        wait(waiting, return_when=FIRST_COMPLETED)
        if any(process.returncode for process in processes):
            for process in processes:
                process.kill()
    for process, done in zip(processes, waiting, strict=True):
        assert process.returncode == 0, done.result()[1]
    return by_rank(folder)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_fsdp2_has_each_ranks_own_device(tmp_path: Path) -> None:
    for rank, run in started(tmp_path, "sharded", **devices.need_two()).items():
        steps = device_figures.check_figures(run, tmp_path, rank)
        assert {tuple(one.name for one in step.devices) for step in steps} == {(f"cuda{rank}",)}


def test_a_rank_that_sees_only_its_own_device_calls_it_the_first(tmp_path: Path) -> None:
    runs = started(tmp_path, "own", **devices.need_two())
    used = set()
    for rank, run in runs.items():
        steps = device_figures.check_figures(run, tmp_path, rank)
        assert {tuple(one.name for one in step.devices) for step in steps} == {("cuda0",)}
        samples = [one for one in run.directory.events() if isinstance(one, Sample) and one.devices]
        used |= {device.used for device in samples[-1].devices}
    assert len(used) == 2  # each rank's own device, not that of the other
