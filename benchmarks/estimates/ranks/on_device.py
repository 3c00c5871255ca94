"""Compare estimates with a rank on a simulated device: ``python -m benchmarks.estimates.ranks.on_device``.

It runs with torch's CUDA build on simulated devices (`tests/cuda_runtime`), in torch's own process group for
NCCL. The simulated NCCL waits for nobody, so one rank trains alone, in a process of its own.
"""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import memlog
from benchmarks.estimates.models import Case
from benchmarks.estimates.pages import put_into
from benchmarks.estimates.ranks.cases import WAYS, step_of, trainings
from benchmarks.estimates.ranks.tables import errors_by_model

RANKS: Final = (2, 8)
STEPS: Final = 4
WATCHDOG: Final = 0.1
"""Seconds between two looks of NCCL's thread, which until then holds what DDP has reduced. So the buckets
that DDP replaces after its first step can outlive a step that computes nothing, as on a simulated device."""


class Bytes(NamedTuple):
    """Peaks of a training: what tensors asked for, and what the allocator reserved."""

    requested: int
    reserved: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into FILE")
    options = parser.parse_args()
    errors: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for (case, way), ranks in product(trainings(), RANKS):
        if options.only not in f"{case.name}, {way}, {ranks} ranks":
            continue
        real, found = in_own_process(compared, case, way, ranks)
        for name, measured, guess in zip(Bytes._fields, real, found, strict=True):
            errors[name][case.name, way].append(guess / measured - 1)
        print(f"{case.name}, {way}, {ranks} ranks: {real} {found}", end=" ")
        print(
            *(f"{guess / measured - 1:+.2%}" for measured, guess in zip(real, found, strict=True))
        )
        sys.stdout.flush()
    counts = " and ".join(map(str, RANKS))
    tables = (
        f"torch {torch.__version__}, one of {counts} ranks, the larger error.\n\n"
        + "\n\n".join(
            f"{name.capitalize()} bytes:\n\n{errors_by_model(errors[name])}"
            for name in Bytes._fields
        )
    )
    print(tables)
    if options.write:
        put_into(options.write, f"{tables}\n", "make estimate-bench-ranks-cuda")


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own, in which CUDA has not been used."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writing, "w") as answer:
                json.dump(function(*arguments), answer)
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("a training has failed: its error is above")
    return json.loads(text)


def compared(case: Case, way: str, ranks: int) -> tuple[Bytes, Bytes]:
    """Return the peaks of a training, and those of its estimate."""
    # On compute capability 9.0, torch prefers cuDNN's attention, which the simulated device does not have.
    torch.backends.cuda.enable_cudnn_sdp(False)
    batch = case.batches[1]

    def model() -> nn.Module:
        return WAYS[way](case.model().cuda(), ranks, "cuda")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.device("cuda"):
            step_of(case)(model, optimizer, batch)

    found = memlog.estimate(step, model=model, optimizer=torch.optim.AdamW, ranks=ranks)
    assert found.recording.result.peak is not None
    assert found.reserved is not None
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=ranks)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step(trained, optimizer)
        time.sleep(2 * WATCHDOG)
    stats = torch.cuda.memory_stats()
    real = (stats[f"{kind}_bytes.all.peak"] for kind in Bytes._fields)
    return Bytes(*real), Bytes(found.recording.result.peak, found.reserved)


if __name__ == "__main__":
    main()
