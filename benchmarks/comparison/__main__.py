"""Compare memlog with other tools: ``python -m benchmarks.comparison [--python TOOL=INTERPRETER …]``.

A tool runs in this interpreter unless the option names another. A tool that is not installed is left out,
and the report names it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.__main__ import machine
from benchmarks.comparison.arms import ARMS, KILLED_STEP, SPIKE_STEP
from benchmarks.comparison.readings import READERS, Reading, none, text_about
from memlog._internal.terminal import MIB

SCRIPT = Path(__file__).with_name("arms.py")
PACKAGES = {
    "MLflow": "mlflow",
    "W&B": "wandb",
    "stormlog": "stormlog",
    "TraceML": "traceml_ai",
    "Lightning": "lightning",
    "Composer": "composer",
}
"""Name of each tool's Python module, by the first word in the names of the arms that use the tool."""
DISTRIBUTIONS = {"traceml_ai": "traceml-ai", "composer": "mosaicml"}
MEASURED_FROM = SPIKE_STEP + 10
"""First step whose time is measured."""
BASES = ("Lightning", "Composer")
"""Arms of a trainer without a tool: the bases of that trainer's arms. The base of other arms is ``bare``."""
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"


class Done(NamedTuple):
    """A run of one arm."""

    arm: str
    seconds: float
    """Duration of the whole program, from its start to its exit."""
    step_ms: float
    """Median wall-clock milliseconds of a step."""
    processor_ms: float
    """Mean processor milliseconds of the training process per step, its threads included."""
    peak_mib: float
    """The process's largest resident set, as the kernel reports it."""
    readings: list[Reading]
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], metavar="TOOL=INTERPRETER")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each arm (default 7)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a run (default 300)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in FILE")
    options = parser.parse_args()
    pythons = dict(one.partition("=")[::2] for one in options.python)
    for tool, python in pythons.items():
        if tool not in PACKAGES or not Path(python).is_file():
            parser.error(
                f"--python {tool}={python}: pass one of {', '.join(PACKAGES)}, and a program"
            )
    versions = {
        tool: version_of(module, pythons.get(tool, sys.executable))
        for tool, module in PACKAGES.items()
    }
    arms = [arm for arm in ARMS if versions.get(first_word(arm), "memlog")]
    done: dict[str, dict[str, list[Done]]] = defaultdict(lambda: defaultdict(list))
    for number in track(range(options.rounds), description="rounds"):
        shift = number % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            done["spike"][arm].append(run(arm, "spike", options.steps, pythons))
    for arm in arms:
        for scenario in ("killed", "leak"):
            if arm in READERS:
                done[scenario][arm].append(run(arm, scenario, options.steps, pythons))
    text = "\n\n".join(
        [
            described(versions, options.rounds, options.steps),
            cost_table(done["spike"]),
            found_table(done),
        ]
    )
    Console(width=140).print(text, markup=False, highlight=False)
    if options.write:
        before, _, rest = options.write.read_text().partition(BEGIN)
        options.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def first_word(arm: str) -> str:
    return re.split(r"[ ,]", arm)[0]


def version_of(module: str, python: str) -> str:
    """Return the version of a tool in its interpreter; empty if it is not installed there."""
    name = DISTRIBUTIONS.get(module, module)
    code = (
        "from importlib.metadata import version; "
        f"print(version({name!r}), 'with torch', version('torch'))"
    )
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def run(arm: str, scenario: str, steps: int, pythons: Mapping[str, str]) -> Done:
    """Run an arm in a folder of its own, and read the files that it leaves there."""
    python = pythons.get(first_word(arm), sys.executable)
    arguments = [arm, scenario, str(steps)]
    command = [python, str(SCRIPT), *arguments]
    if arm == "TraceML":
        launcher = str(Path(python).with_name("traceml"))
        command = [launcher, "run", "--run-name", "run", str(SCRIPT), "--args", *arguments]
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "MEMLOG_", "WANDB_"))
    }
    with tempfile.TemporaryDirectory(prefix="comparison-") as name:
        folder = Path(name)
        begun = time.perf_counter()
        ended = subprocess.run(
            command,
            cwd=folder,
            env={**clean, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - begun
        printed = ended.stdout + ended.stderr
        if arm.startswith(("memlog", "Lightning, memlog")):
            show = [sys.executable, "-m", "memlog", "show", "latest"]
            printed += subprocess.run(
                show, cwd=folder, capture_output=True, text=True, check=True
            ).stdout
        readings = list(READERS.get(arm, none)(folder))
        text = text_about(folder, printed)
        if scenario == "killed":
            return Done(arm, seconds, 0.0, 0.0, 0.0, readings, text)
        if not (folder / "measured.json").exists():
            raise RuntimeError(f"{arm!r} did not reach its end:\n{printed}")
        measured = json.loads((folder / "measured.json").read_text())
    begun_at = measured["begun"][MEASURED_FROM:]
    clock = [after[0] - before[0] for before, after in itertools.pairwise(begun_at)]
    processor = (begun_at[-1][1] - begun_at[0][1]) / (len(begun_at) - 1)
    return Done(
        arm,
        seconds,
        statistics.median(clock) * 1e3,
        processor * 1e3,
        measured["peak"] / MIB,
        readings,
        text,
    )


def described(versions: Mapping[str, str], rounds: int, steps: int) -> str:
    """Return sentences about the machine, the tools and the rounds, and about tools that are missing."""
    there = ", ".join(f"{tool} {version}" for tool, version in versions.items() if version)
    missing = ", ".join(tool for tool, version in versions.items() if not version)
    return (
        f"{machine()} Tools: {there}. {rounds} rounds of {steps} steps; each round runs each arm. "
        "Figures are medians, with the smallest and the largest of the rounds in brackets."
        + (f" Not installed here, so not run: {missing}." if missing else "")
    )


def base_of(arm: str) -> str:
    return first_word(arm) if first_word(arm) in BASES else "bare"


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def cost_table(done: Mapping[str, list[Done]]) -> str:
    """Return the table of costs: each arm's times, and the processor time that its tool adds to its base."""
    lines = [
        "| tool | whole run, s | step on the clock, ms | added processor time per step, ms |",
        "|---|---|---|---|",
    ]
    for arm, runs in done.items():
        base = done[base_of(arm)]
        added = [
            one.processor_ms - other.processor_ms for one, other in zip(runs, base, strict=True)
        ]
        if runs is base:
            shown = f"({spread([one.processor_ms for one in runs], 2)} in all)"
        else:
            shown = spread(added, 2)
        whole = spread([one.seconds for one in runs], 1)
        lines.append(f"| {arm} | {whole} | {spread([one.step_ms for one in runs], 1)} | {shown} |")
    return "\n".join(lines)


def found_table(done: Mapping[str, Mapping[str, list[Done]]]) -> str:
    """Return the table of what each tool finds: one step's peak, readings before a SIGKILL, and a leak."""
    head = (
        "tool",
        "readings of a run",
        "of whose memory",
        "largest reading / true peak",
        f"names step {SPIKE_STEP}",
        f"readings left by `kill -9` at step {KILLED_STEP}",
        "names the leaking list",
    )
    rows = [head, ("---",) * len(head)]
    for arm, runs in done["spike"].items():
        if arm in READERS:
            rows.append(found(arm, runs, done["killed"][arm][0], done["leak"][arm][0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def found(arm: str, runs: list[Done], killed: Done, leak: Done) -> tuple[str, ...]:
    """Return a row of `found_table`."""
    largest = [
        max(one.readings, key=lambda reading: reading.mib or 0.0) for one in runs if one.readings
    ]
    of_process = any(reading.mib for reading in largest)
    ratios = [
        (reading.mib or 0.0) / one.peak_mib for reading, one in zip(largest, runs, strict=False)
    ]
    named = sum(reading.step == SPIKE_STEP for reading in largest) if of_process else 0
    return (
        arm,
        spread([float(len(one.readings)) for one in runs], 0),
        "the process" if of_process else "the machine" if largest else "none",
        spread(ratios, 2) if of_process else "-",
        f"{named} of {len(runs)} runs",
        str(len(killed.readings)),
        "yes" if "validation_losses" in leak.text else "no",
    )


if __name__ == "__main__":
    main()
