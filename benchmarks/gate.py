"""Count wrong verdicts of gates: ``python -m benchmarks.gate [--repeats 200] [--write FILE]``.

A steady training and one whose activations are 1 % larger are each repeated in processes of their own. Each
repeat is judged against a baseline file that was written before. A verdict is wrong if a gate fails for the
steady training or passes for the heavier one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.__main__ import machine
from benchmarks.estimates.pages import put_into
from memlog.journal import RunDirectory
from memlog.reports.figures import RunFigures, repeated, run_figures
from memlog.reports.gates import (
    Gate,
    baseline_of,
    find_baseline,
    judge,
    parse_gate,
    read_baselines,
    update_baselines,
)

STEADY, HEAVIER = 1000, 1010
"""Width of the hidden layers."""
GROUP = 5
"""Runs of one training whose mean is judged, for figures that differ from run to run."""
_NAME = "benchmark"
_MIB = 1024**2


def train(width: int, directory: Path) -> None:
    """Record four steps of a small network whose activations take most of its memory."""
    import torch
    from torch import nn

    import memlog

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # without memlog's lines
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [
        module
        for _ in range(6)
        for module in (nn.Linear(width, 64), nn.Linear(64, width), nn.Tanh())
    ]
    model = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with memlog.init("local", model=model, layers=True, budget=1, name=_NAME, dir=directory):
        for _ in range(4):
            model(torch.randn(1024, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def recorded(width: int, count: int, directory: Path, jobs: int) -> list[RunFigures]:
    """Return the figures of ``count`` runs, each in a process of its own."""
    # Imported here, so that no process has to.
    import torch  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting = [
        context.Process(target=train, args=(width, directory / f"{width}-{at}"))
        for at in range(count)
    ]
    while waiting:
        batch, waiting = waiting[:jobs], waiting[jobs:]
        for process in batch:
            process.start()
        for process in batch:
            process.join()
            assert process.exitcode == 0, process.exitcode
    folders = (directory / f"{width}-{at}" for at in range(count))
    return [
        run_figures(RunDirectory(path))
        for folder in folders
        for path in folder.iterdir()
        if path.is_dir()
    ]


def verdicts(gate: Gate, baseline: RunFigures, runs: Sequence[RunFigures]) -> Counter[str]:
    """Count how often a gate failed, passed and could not be judged."""
    words = {True: "failed", False: "passed", None: "unsure"}
    return Counter(words[judge(gate, baseline, run).failed] for run in runs)


def groups(runs: Sequence[RunFigures]) -> list[RunFigures]:
    return [repeated(runs[at : at + GROUP]) for at in range(0, len(runs) - GROUP + 1, GROUP)]


def page(
    first: Sequence[RunFigures],
    steady: Sequence[RunFigures],
    heavier: Sequence[RunFigures],
    file: Path,
) -> Iterator[str]:
    """Yield the lines of the page. ``first`` are the runs of the baseline file ``file``."""
    update_baselines(file, {_NAME: baseline_of(repeated(first))})
    baseline = find_baseline(file, read_baselines(file), _NAME)
    update_baselines(file, {_NAME: baseline_of(first[0])})
    single = find_baseline(file, read_baselines(file), _NAME)
    peaks = [
        sorted({run.figures["trace.peak"] for run in runs if run.figures["trace.peak"]})
        for runs in (steady, heavier)
    ]
    rss = [[run.figures["host.rss"] or 0.0 for run in runs] for runs in (steady, heavier)]
    half = (peaks[1][0] - peaks[0][0]) / 2
    exact, wide = parse_gate("trace.peak > +0.5%"), parse_gate(f"host.rss > +{half / _MIB:.3f} MiB")
    rows = (
        (f"`{exact.text}`, one run each", exact, single, steady, heavier),
        (f"`{wide.text}`, {GROUP} repeats each", wide, baseline, groups(steady), groups(heavier)),
        (f"`{wide.text}`, one run each, no interval", wide, first[0], steady, heavier),
    )
    yield f"{machine()} {len(steady)} runs of each training."
    yield ""
    yield (
        "| gate | steady: failed (wrong) | steady: unsure | 1 % heavier: passed (wrong) | "
        "1 % heavier: unsure | verdicts |"
    )
    yield "|---|--:|--:|--:|--:|--:|"
    for name, gate, against, *trainings in rows:
        same, more = (verdicts(gate, against, runs) for runs in trainings)
        count = same.total() + more.total()
        counts = same["failed"], same["unsure"], more["passed"], more["unsure"], count
        yield f"| {name} | {' | '.join(map(str, counts))} |"
    yield ""
    means, deviations = ([f"{of(each) / _MIB:.1f}" for each in rss] for of in (fmean, stdev))
    yield (
        f"`trace.peak` was {_mib(peaks[0])} in the steady training and {_mib(peaks[1])} in the heavier "
        f"one, in each run. `host.rss` was {' and '.join(means)} MiB on average, with a standard deviation "
        f"of {' and '.join(deviations)} MiB."
    )


def _mib(values: Sequence[float]) -> str:
    low, high = values[0] / _MIB, values[-1] / _MIB
    return f"{low:.3f} MiB" if low == high else f"{low:.3f} to {high:.3f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200, help="runs of each training")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table into FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memlog-benchmark-") as directory:
        folder = Path(directory)
        first = recorded(STEADY, GROUP, folder / "baseline", options.jobs)
        steady, heavier = (
            recorded(width, options.repeats, folder, options.jobs) for width in (STEADY, HEAVIER)
        )
        lines = list(page(first, steady, heavier, folder / "memory.json"))
    print("\n".join(lines))
    if options.write:
        put_into(options.write, "\n".join(lines) + "\n", "make gate-bench")


if __name__ == "__main__":
    main()
