"""Two ranks that trace one step of each wrapper of torch, for tests of the tracer."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from support.launching import environment

PROGRAM = """
    import gc, json, os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from memlog import MemoryTracer

    WIDTH, BATCH = 256, 32
    kind = sys.argv[1]
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")

    def model():
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
        return nn.Sequential(*blocks).to(device)

    def sharded(**options):
        made = model()
        for module in (*made, made):
            fully_shard(module, mesh=mesh, **options)
        return made

    WAYS = {
        "ddp": lambda: DistributedDataParallel(model(), bucket_cap_mb=0.5),
        "ddp in views": lambda: DistributedDataParallel(model(), gradient_as_bucket_view=True),
        "fsdp": sharded,
        "fsdp kept": lambda: sharded(reshard_after_forward=False),
    }
    mesh = dist.init_device_mesh(kind, (2,))
    for way, make in WAYS.items():
        gc.collect()
        older = torch.cuda.memory_allocated() if kind == "cuda" else 0
        made = make()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, foreach=False)
        for step in range(4):
            tracer = MemoryTracer()
            if kind == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with tracer.trace(made):
                made(torch.ones(BATCH, WIDTH, device=device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not tracer.health.faults, tracer.health.faults
            result = tracer.result
            found = {
                "way": way,
                "step": step,
                "peak": result.peak,
                "categories": result.categories,
                "older": older,
                "exactness": result.exactness,
                "allocator": torch.cuda.max_memory_allocated() if kind == "cuda" else None,
            }
            if dist.get_rank() == 0:
                print(json.dumps(found))
        del made, optimizer
    dist.barrier()
    dist.destroy_process_group()
"""
PARAMETERS = 4 * 4 * (256 * 256 + 256)
"""Bytes of the model's parameters."""


def traced(folder: Path, kind: str, **more: str) -> dict[str, list[dict[str, Any]]]:
    """Return what the first of two ranks traced on a ``kind`` of device, by way and step."""
    program = folder / "ranks.py"
    program.write_text(textwrap.dedent(PROGRAM))
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    done = subprocess.run(
        [*torchrun, str(program), kind],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_way: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            by_way.setdefault(one["way"], []).append(one)
    return by_way
