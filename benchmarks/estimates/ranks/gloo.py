"""Compare estimates with two real ranks: ``python -m benchmarks.estimates.ranks.gloo [--write FILE]``.

Two processes train with gloo on the CPU, and count the blocks of torch's allocator (`blocks.c`).
"""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import memlog
from benchmarks.__main__ import machine
from benchmarks.estimates.models import Case, text
from benchmarks.estimates.pages import put_into
from benchmarks.estimates.ranks.cases import WAYS, step_of, trainings
from benchmarks.estimates.ranks.tables import errors_by_model

RANKS: Final = 2
STEPS: Final = 8
MANY: Final = 1024
SHARDED: Final = "fully_shard"


class Training(NamedTuple):
    """A model that ranks train together in one way."""

    case: Case
    way: str
    batch: int

    @property
    def title(self) -> str:
        return f"{self.case.name}, {self.way}, batch {self.batch}"

    def model(self, ranks: int) -> nn.Module:
        return WAYS[self.way](self.case.model(), ranks, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into FILE")
    parser.add_argument("--rank", type=int, help="train as this rank, and print the peaks")
    parser.add_argument("--store", help="file through which the ranks find each other")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = chosen_trainings(options.only)
    if options.rank is not None:
        train(chosen, options.rank, options.store)
        return
    measured = zip(*real_peaks(options.only), strict=True)
    errors: dict[tuple[str, str], list[float]] = {}
    later: list[float] = []
    for training, by_rank in zip(chosen, measured, strict=True):
        real = max(min(peaks) for peaks in by_rank)
        later += (max(0.0, peak / min(peaks) - 1) for peaks in by_rank for peak in peaks)
        error = estimated(training, RANKS).peak / real - 1
        errors[training.case.name, training.way] = [error]
        print(f"{training.title}: {error:+.2%}", flush=True)
    slow = sum(each > 0 for each in later)
    tables = (
        f"{machine()}\n\n{errors_by_model(errors)}\n\n"
        f"In {slow} of {len(later)} steps, a thread of gloo freed its copy later, and the peak was up to "
        f"{max(later):.1%} higher.\n\n{times([each for each in chosen if each.way == SHARDED])}\n"
    )
    print(tables)
    if options.write:
        put_into(options.write, tables, "make estimate-bench-ranks")


def chosen_trainings(only: str) -> list[Training]:
    found = (Training(case, way, case.batches[0]) for case, way in trainings())
    return [one for one in found if only in one.title]


def estimated(training: Training, ranks: int) -> memlog.Estimate:
    return memlog.estimate(
        step_of(training.case),
        model=lambda: training.model(ranks),
        optimizer=torch.optim.AdamW,
        batch=training.batch,
        ranks=ranks,
        device="cpu",
    )


def times(chosen: list[Training]) -> str:
    """Return a sentence about the time of estimates for many ranks, also of a large model."""
    seconds = []
    for training in chosen:
        began = time.process_time()
        estimated(training, MANY)
        seconds.append(time.process_time() - began)
    began = time.process_time()
    memlog.estimate(
        step_of(Case("", large, lambda batch: torch.randint(2000, (batch, 512)), text)),
        model=lambda: WAYS[SHARDED](large().cuda(), MANY, "cuda"),
        optimizer=torch.optim.AdamW,
        batch=1,
        ranks=MANY,
        device="H100",
    )
    took = time.process_time() - began
    return (
        f"Estimates for {MANY:,} ranks with {SHARDED} took {min(seconds):.1f} to {max(seconds):.1f} s of "
        f"processor time (aim: 15 s), and {took:.0f} s for a Llama of 32 layers with 6.7 billion parameters "
        "on a GPU."
    )


def large() -> nn.Module:
    import transformers

    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    return made


@contextmanager
def counting(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the variables of a process that counts the blocks of torch's CPU allocator."""
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder, "blocks.so")
        source = Path(__file__).with_name("blocks.c")
        subprocess.run(
            [shutil.which("cc") or "cc", "-O2", "-shared", "-fPIC", source, "-o", counter, "-ldl"],
            check=True,
        )
        yield {**environment, "LD_PRELOAD": str(counter), "GLOO_SOCKET_IFNAME": "lo"}


def counted_blocks() -> Any:
    """Return the functions of `blocks.c` in a process that `counting` has made."""
    blocks: Any = ctypes.CDLL(None)
    for function in (blocks.torch_blocks_level, blocks.torch_blocks_peak):
        function.restype = ctypes.c_size_t
    return blocks


def real_peaks(only: str) -> list[list[list[int]]]:
    """Let two processes train together. Return the peaks of each, of one training after the other."""
    command = [sys.executable, "-m", "benchmarks.estimates.ranks.gloo", "--only", only]
    with counting(os.environ) as environment, tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [*command, "--store", str(Path(folder, "store")), "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        answers = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank has failed: its error is above")
    return [[json.loads(line) for line in answer.splitlines()] for answer in answers]


def train(chosen: list[Training], rank: int, store: str) -> None:
    """Train all, and print the peaks of the steps after the first one, which makes the optimizer's state."""
    blocks = counted_blocks()
    dist.init_process_group(
        "gloo",
        store=torch._C._distributed_c10d.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
    )
    for training in chosen:
        gc.collect()
        before = blocks.torch_blocks_level()
        torch.manual_seed(0)
        model = training.model(RANKS)
        optimizer, step = torch.optim.AdamW(model.parameters()), step_of(training.case)
        peaks = []
        for _ in range(STEPS):
            blocks.torch_blocks_peak()
            step(model, optimizer, training.batch)
            peaks.append(blocks.torch_blocks_peak() - before)
        print(json.dumps(peaks[1:]), flush=True)
        del model, optimizer
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
