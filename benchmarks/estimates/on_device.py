"""Compare estimates with CUDA's allocator: ``python -m benchmarks.estimates.on_device [--write FILE]``.

It runs with torch's CUDA build on simulated devices (`tests/cuda_runtime`), in one process for each GPU. A
training is a model, an optimizer, a precision (float32, bfloat16 autocast, checkpointing), a setting of the
allocator (default, expandable segments) and a GPU.
"""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memlog
from benchmarks.estimates.models import Case, cases, on_device_only, repeated_blocks
from benchmarks.estimates.optimizers import OPTIMIZERS
from benchmarks.estimates.pages import put_into
from memlog.estimates.caching_allocator import CachingAllocator
from memlog.estimates.gpus import chosen

MODES: Final = ("float32", "bfloat16 autocast", "checkpointing")
MEMORY: Final = {"A100": "80GiB", "H100": "80GiB"}
STEPS: Final = 6
LARGER: Final = 32
"""Factor of the batches, which the benchmark on the CPU keeps small."""
RECURRENT: Final = ("LSTM", "GRU")
"""Models whose recurrent layers cuDNN computes. Estimates name them."""
MIB: Final = 1024**2


class Training(NamedTuple):
    """One training. Peaks are bytes, after each of the steps."""

    name: str
    optimizer: str
    mode: str
    expandable: bool
    gpu: str
    batch: int
    allocated: list[int]
    reserved: list[int]
    estimated_allocated: list[int]
    estimated_reserved: list[int]

    @property
    def peak_error(self) -> float:
        return _largest(self.estimated_allocated, self.allocated)

    @property
    def reserved_error(self) -> float:
        return _largest(self.estimated_reserved, self.reserved)

    @property
    def title(self) -> str:
        segments = "expandable segments" if self.expandable else "default segments"
        return f"{self.name}, {self.optimizer}, {self.mode}, {segments}, {self.gpu}"


def _largest(estimated: Sequence[int], measured: Sequence[int]) -> float:
    """Return the largest relative error after any of the steps, with its sign."""
    pairs = zip(estimated, measured, strict=True)
    return max((guess / real - 1 for guess, real in pairs), key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into FILE")
    parser.add_argument("--gpu", choices=MEMORY, help="print this GPU's trainings as JSON")
    parser.add_argument(
        "--every-optimizer",
        action="store_true",
        help="each model with each optimizer (4 times as long), not with one after the other in turn",
    )
    options = parser.parse_args()
    every: bool = options.every_optimizer
    if options.gpu:
        for training in measured(options.only, options.gpu, every=every):
            print(json.dumps(training), flush=True)
        return
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda gpu: _in_own_process(options.only, gpu, every=every), MEMORY)
        trainings = [training for each in found for training in each]
    tables = f"torch {torch.__version__}\n\n{summary(trainings)}\n\n{table(trainings)}\n"
    print(tables)
    if options.write:
        put_into(options.write, tables, "make estimate-bench-cuda")


def _in_own_process(only: str, gpu: str, *, every: bool) -> list[Training]:
    """Run the trainings of a GPU in a process whose simulated device has this GPU's properties."""
    command = [sys.executable, "-m", "benchmarks.estimates.on_device", "--gpu", gpu, "--only", only]
    command += ["--every-optimizer"] if every else []
    environment = {**os.environ, **device(gpu)}
    found = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            training = Training(*json.loads(line))
            print(f"{training.title}: {training.peak_error:+.2%} {training.reserved_error:+.2%}")
            sys.stdout.flush()
            found.append(training)
    if process.returncode:
        raise SystemExit(process.returncode)
    return found


def device(gpu: str) -> dict[str, str]:
    """Return the variables of a simulated device with the properties of a GPU."""
    properties = chosen(gpu)[1]
    major, minor = properties.capability
    return {
        "FAKE_CUDA_CAPABILITY": f"{major}.{minor}",
        "FAKE_CUDA_PROCESSORS": str(properties.processors),
        "FAKE_CUDA_MEMORY": MEMORY[gpu],
        "FAKE_CUDA_STATE": f"/dev/shm/memlog-estimates-{os.getpid()}-{gpu}",  # noqa: S108 - its own
        "FAKE_CUDA_COPY": "4k",
        "OMP_NUM_THREADS": "1",
    }


def measured(only: str, gpu: str, *, every: bool) -> Iterator[Training]:
    # On compute capability 9.0, torch prefers cuDNN's attention, which the simulated device does not have.
    torch.backends.cuda.enable_cudnn_sdp(False)
    names = list(OPTIMIZERS)
    chosen = (case for case in (*cases(), *on_device_only()) if only in case.name)
    for at, case in enumerate(chosen):
        if "autocast" in case.name:
            continue  # each model also runs under autocast
        model = case.model()
        gc.collect()
        gc.freeze()  # collections between the trainings need not look at the libraries again
        for number, (mode, expandable) in enumerate(product(MODES, (False, True))):
            tried = names if every else [names[(at + number) % len(names)]]
            for optimizer in tried:
                yield compared(case, model, optimizer, mode, gpu, expandable=expandable)


def compared(
    case: Case, model: nn.Module, optimizer: str, mode: str, gpu: str, *, expandable: bool
) -> Training:
    """Run a training on the device, and estimate it."""
    batch = case.batches[1] * (LARGER if case.batches[1] > 1 else 1)
    step = _step(case, batch, autocast=mode == "bfloat16 autocast")
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")

    def made() -> nn.Module:
        copied = copy.deepcopy(model)
        return checkpointed(copied) if mode == "checkpointing" else copied

    real = run(made(), OPTIMIZERS[optimizer], step)
    found = memlog.estimate(
        step,
        model=made(),
        optimizer=OPTIMIZERS[optimizer],
        device=gpu,
        expandable_segments=expandable,
    )
    allocator = CachingAllocator(expandable=expandable)
    assert found._replay is not None
    peaks = [
        (allocator.most_allocated, allocator.most_reserved) for _ in found._replay.steps(allocator)
    ]
    assert peaks[-1] == (found.peak, found.reserved)
    return Training(
        *(case.name, optimizer, mode, expandable, gpu, batch),
        *(
            [allocated for allocated, _reserved in real],
            [reserved for _allocated, reserved in real],
        ),
        *([allocated for allocated, _ in peaks], [reserved for _, reserved in peaks]),
    )


def _step(case: Case, batch: int, *, autocast: bool) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.device("cuda"):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = case.loss(model, case.batch(batch))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], step: Callable[..., None]
) -> list[tuple[int, int]]:
    """Train a model. Return the peaks of allocated and reserved bytes after each step."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert not torch.cuda.memory_reserved()
    model = model.to("cuda")
    optimizer = make(model.parameters())
    peaks = []
    for _ in range(STEPS):
        step(model, optimizer)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return peaks


def checkpointed(model: nn.Module) -> nn.Module:
    """Let the model's blocks run their forward again in the backward pass."""
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable()  # type: ignore[operator] # of transformers
        return model
    for block in repeated_blocks(model):
        block.forward = _again(block.forward)
    return model


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def summary(trainings: list[Training]) -> str:
    """Return a table of the errors. cuDNN's recurrent layers are apart."""
    counted = [each for each in trainings if each.name not in RECURRENT]
    lines = [
        "| figure | value | aim |",
        "| --- | ---: | ---: |",
        f"| models | {len({each.name for each in trainings})} | 27 |",
        f"| trainings, each of {STEPS} steps | {len(trainings)} | |",
    ]
    for what, error, median, largest in (
        ("peak", lambda each: each.peak_error, 0.005, 0.02),
        ("reserved", lambda each: each.reserved_error, 0.01, 0.04),
    ):
        errors = [abs(error(each)) for each in counted]
        worst = max(counted, key=lambda each: abs(error(each)))
        lines += [
            f"| {what}: median error | {statistics.median(errors):.2%} | {median:.1%} |",
            f"| {what}: trainings without an error | {sum(not each for each in errors)} | |",
            f"| {what}: largest error | {error(worst):+.2%} ({worst.title}) | {largest:.0%} |",
        ]
    return "\n".join(lines)


def table(trainings: list[Training]) -> str:
    """Return one line for each model."""
    lines = [
        "| model | batch | peaks, MiB | peak: median, largest error | reserved: median, largest error |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys(each.name for each in trainings):
        own = [each for each in trainings if each.name == name]
        peaks = [each.allocated[-1] / MIB for each in own]
        lines.append(
            f"| {name} | {own[0].batch:,} | {min(peaks):,.0f} to {max(peaks):,.0f} | "
            f"{_errors([each.peak_error for each in own])} | "
            f"{_errors([each.reserved_error for each in own])} |"
        )
    return "\n".join(lines)


def _errors(errors: list[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.2%}, {max(errors, key=abs):+.2%}"


if __name__ == "__main__":
    main()
