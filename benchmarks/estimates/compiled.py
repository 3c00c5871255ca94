"""Compare estimates of compiled models with the allocator: ``python -m benchmarks.estimates.compiled``."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memlog
from benchmarks.__main__ import machine
from benchmarks.estimates.__main__ import peak
from benchmarks.estimates.models import Case, cases
from benchmarks.estimates.optimizers import OPTIMIZERS
from benchmarks.estimates.pages import put_into

_COMMAND = "python -m benchmarks.estimates.compiled"


class Training(NamedTuple):
    """One compiled training. Sizes are bytes."""

    name: str
    optimizer: str
    batch: int
    measured: int
    estimated: int
    uncompiled: int
    """Estimate of the same training without ``torch.compile``."""

    def line(self) -> str:
        mib = 1024**2
        return (
            f"| {self.name} | {self.optimizer} | {self.batch:,} | {self.measured / mib:.2f} | "
            f"{self.estimated / mib:.2f} | {self.estimated / self.measured - 1:+.2%} | "
            f"{self.uncompiled / self.measured - 1:+.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name this pattern matches")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| model | optimizer | batch | measured MiB | estimated MiB | error | estimate without compiling |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for training in measured(options.only):
        print(training.line(), flush=True)
        lines.append(training.line())
        if options.write:  # after each model, because all of them take an hour
            put_into(options.write, "\n".join((machine(), "", *lines, "")), _COMMAND)


def measured(only: str) -> Iterator[Training]:
    names = list(OPTIMIZERS)
    for at, case in enumerate(one for one in cases() if re.search(only, one.name)):
        torch.compiler.reset()  # so that no model counts for the next one's limit of compilations
        try:
            yield compared(case, names[at % 4], case.batches[-1])
        except memlog.ConfigurationError as error:
            print(f"{case.name}: refused, because {error}", flush=True)


def compared(case: Case, optimizer: str, batch: int) -> Training:
    """Estimate a compiled training, run it, and measure it."""

    def step(model: Any, optimizer: Any, batch: int) -> None:
        case.loss(model, case.batch(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def estimated(model: nn.Module) -> int:
        made = OPTIMIZERS[optimizer]
        return memlog.estimate(step, model=model, optimizer=made, batch=batch, device="cpu").peak

    def compiled() -> Any:
        return torch.compile(case.model())

    torch.manual_seed(0)
    found = estimated(compiled())
    uncompiled = estimated(case.model())
    return Training(
        case.name, optimizer, batch, real_peak(compiled, step, optimizer, batch), found, uncompiled
    )


def real_peak(
    make: Callable[[], nn.Module], step: Callable[..., None], optimizer: str, batch: int
) -> int:
    """Return the peak of torch's CPU allocator in bytes in two steps, after the steps that compile."""
    model = make()
    stepped = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        step(model, stepped, batch)
    kept = (*model.parameters(), *model.buffers(), *tree_leaves(list(stepped.state.values())))
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in kept
        if isinstance(one, Tensor)
    }

    def train() -> None:
        for _ in range(2):
            step(model, stepped, batch)

    return sum(storages.values()) + peak(train)


if __name__ == "__main__":
    main()
