"""Memory that an LRU cache of simulations saves compared to loading all of them, measured by memlog.

python examples/lazy_loading.py                     # 20 simulations, 505 MB, 5 of them cached
python examples/lazy_loading.py --max-cached-sims 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

import memlog
from hyco.dataset import GroupedSampler, Rollouts

STEPS = 4
BATCH_SIZE = 4
MB = 1024**2


class Measured(NamedTuple):
    """Measurements of one way of loading: sizes in bytes."""

    resident: int
    held: int
    loads: int
    hits: int


def make_simulations(folder: Path, number: int, shape: tuple[int, ...]) -> int:
    """Write files of noise; return the size of their data in bytes."""
    noise = np.random.default_rng(0).standard_normal(shape)
    for index in range(number):
        np.save(folder / f"sim_{index:06d}.npy", noise + index)
    return number * noise.nbytes


def train(files: list[Path], max_cached_sims: int | None) -> tuple[memlog.Session, Rollouts]:
    """Load an epoch's batches without training on them; memlog reads the memory at each step."""
    torch.set_num_threads(1)
    rollouts = Rollouts(files, STEPS, max_cached_sims)
    sampler = GroupedSampler(rollouts, max_cached_sims, torch.Generator().manual_seed(0))
    name = f"max_cached_sims={max_cached_sims}"
    with memlog.init("local", name=name, config={"quiet": True}) as session:
        for _ in DataLoader(rollouts, BATCH_SIZE, sampler=sampler):
            session.step()
    return session, rollouts


def report_on(session: memlog.Session, rollouts: Rollouts) -> None:
    """Print the facts that `measure` reads."""
    facts = {"run": str(session.directory), "held": rollouts.cache.held_bytes}
    print(json.dumps({**facts, "loads": rollouts.cache.loads, "hits": rollouts.cache.hits}))


def measure(folder: Path, max_cached_sims: int | None) -> Measured:
    """Run `train` in its own process; return the peak of its steps from memlog, and the cache's figures."""
    program = [sys.executable, __file__, "--folder", str(folder)]
    cached = [] if max_cached_sims is None else ["--max-cached-sims", str(max_cached_sims)]
    facts = json.loads(_output(*program, *cached))
    run = Path(facts["run"])
    shown = _output(
        sys.executable, "-m", "memlog", "show", run.name, "--json", "--dir", str(run.parent)
    )
    resident = json.loads(shown)["metrics"]["memory/host/rss_mib"]["max"]
    return Measured(round(resident * MB), facts["held"], facts["loads"], facts["hits"])


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own


def compare(number: int, shape: tuple[int, ...], max_cached_sims: int) -> None:
    """Print the memory of each way, and the memory that the cache saves."""
    with tempfile.TemporaryDirectory() as name:
        data = make_simulations(Path(name), number, shape)
        eager, cached = measure(Path(name), None), measure(Path(name), max_cached_sims)
    print(
        f"{number} simulations of {list(shape)} float64: {data / MB:.1f} MB (1 MB = 1024\u00b2 bytes)"
    )
    for label, way in (("eager", eager), (f"cached ({max_cached_sims})", cached)):
        rate = way.hits / (way.hits + way.loads)
        print(
            f"  {label:11} resident {way.resident / MB:7.1f} MB, simulations {way.held / MB:6.1f} MB, "
            f"{way.loads} loads, {rate:.0%} hits"
        )
    saved = eager.resident - cached.resident
    print(f"Saved: {saved:,} bytes ({saved / MB:.1f} MB)")
    print(f"  {saved / data:.0%} of the data, {saved / eager.resident:.0%} of the resident set")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the memory that lazy loading saves.")
    parser.add_argument("--simulations", type=int, default=20)
    parser.add_argument("--frames", type=int, default=101)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--max-cached-sims", type=int, help="5 by default")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for `measure`
    options = parser.parse_args()
    if options.folder:
        report_on(*train(sorted(options.folder.glob("*.npy")), options.max_cached_sims))
    else:
        shape = (options.frames, 2, options.resolution, options.resolution)
        compare(options.simulations, shape, options.max_cached_sims or 5)


if __name__ == "__main__":
    main()
