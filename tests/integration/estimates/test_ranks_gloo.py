"""Estimates of two ranks on the CPU, beside the allocators of two real ranks with gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.estimates.ranks import gloo

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

COLLECTIVES = """
import json, sys, time, warnings
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard  # defines fsdp's operations
from torch.utils._python_dispatch import TorchDispatchMode
from benchmarks.estimates.ranks.gloo import counted_blocks
from memlog.estimates.ranks import inside_gloo

warnings.simplefilter("ignore")
N = 2**18
blocks, found = counted_blocks(), []
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
group = dist.group.WORLD

class Rules(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (rule := inside_gloo(func, args, kwargs or {})) is not None:
            found.append(rule.peak)
        return func(*args, **(kwargs or {}))

def compare(name, call, *tensors, kept=0):
    dist.barrier()
    time.sleep(0.1)  # a thread of gloo lets go of what it has sent
    del found[:]
    before = blocks.torch_blocks_level()
    blocks.torch_blocks_peak()
    with Rules():
        result = call(*tensors)
    real = blocks.torch_blocks_peak() - before - kept * 4
    print(json.dumps([name, max(found, default=-1), real]), flush=True)

def values(count=N, kind=torch.float32):
    return torch.zeros(count, dtype=kind)

wait = functional.wait_tensor
compare("all_reduce", dist.all_reduce, values())
compare("broadcast", lambda x: dist.broadcast(x, 0), values())
compare("all_gather_into_tensor", dist.all_gather_into_tensor, values(2 * N), values())
compare("all_gather", dist.all_gather, [values(), values()], values())
compare("reduce_scatter_tensor", dist.reduce_scatter_tensor, values(), values(2 * N))
compare("all_to_all_single", dist.all_to_all_single, values(), values())
compare("functional all_reduce", lambda x: wait(functional.all_reduce(x, "sum", group)), values(), kept=N)
compare("functional all_gather",
        lambda x: wait(functional.all_gather_single(x, 0, group)), values(), kept=2 * N)
compare("functional reduce_scatter",
        lambda x: wait(functional.reduce_scatter_tensor(x, "sum", 0, group)), values(2 * N), kept=N)
cat = lambda given, out: torch.ops.fsdp.chunk_cat(given, 0, 2, out=out.view(2, -1))
rows = lambda count, kind=torch.float32: values(count * 512, kind).view(count, 512)
compare("chunk_cat", cat, [rows(512)], rows(512))
compare("chunk_cat, padded", cat, [rows(513), rows(512)], rows(1026))
compare("chunk_cat, other type", cat, [rows(512, torch.bfloat16)], rows(512))
compare("chunk_cat, padded, other type", cat, [rows(513, torch.bfloat16)], rows(514))
dist.barrier()
dist.destroy_process_group()
"""


def test_what_collectives_allocate_inside(tmp_path: Path) -> None:
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    root = str(Path(__file__).parents[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    with gloo.counting(environment) as counted:
        ranks = [
            subprocess.Popen(
                [sys.executable, script, tmp_path / "store", str(rank)],
                env=counted,
                cwd=root,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        answers = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    found = [json.loads(line) for line in answers[0].splitlines()]
    assert len(found) == 13
    wrong = [each for each in found if abs(each[1] - each[2]) > 20_000]
    assert not wrong


def test_two_real_ranks_need_what_the_estimate_says() -> None:
    chosen = gloo.chosen_trainings("MLP")
    assert len(chosen) == 4
    real = zip(*gloo.real_peaks("MLP"), strict=True)
    for training, by_rank in zip(chosen, real, strict=True):
        measured = max(min(peaks) for peaks in by_rank)
        found = gloo.estimated(training, gloo.RANKS)
        assert found.peak == pytest.approx(measured, rel=0.005), training.title
        assert "inside" not in found.without
