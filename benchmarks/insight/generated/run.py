"""Generate training programs that leak, and their healthy twins; run them with memlog; judge what it says.

``python -m benchmarks.insight.generated.run [--seed N …] [--number N] [--only N …] [--jobs N] [--keep FOLDER]
[--write FILE]``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import track

from benchmarks.insight.generated import report
from benchmarks.insight.generated.programs import Program, Variant, program
from benchmarks.insight.generated.scoring import REMOVED, Said, Score, judge, names_holder
from benchmarks.insight.scoring import Finding, findings_of
from benchmarks.insight.series import MIB, environment, measure_file
from memlog.events import Finding as FindingEvent
from memlog.journal import RunDirectory, list_runs
from memlog.journal.delivery_state import HelperLock

TIMEOUT_S = 300
MEMLOG = Path(sys.executable).with_name("memlog")
NUMBER = 150
"""Programs, each with its twin: 300 runs."""
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables with which glibc returns freed memory to the system at once."""


class Result(NamedTuple):
    """Result of one program and its twin. ``score`` is None if a run failed."""

    program: Program
    leak: Said
    twin: Said
    score: Score | None
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="seeds (default 1)")
    parser.add_argument(
        "--number", type=int, default=NUMBER, help=f"programs of each seed (default {NUMBER})"
    )
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these programs alone")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (default 1)")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep programs, runs and results in FOLDER"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables to FILE")
    options = parser.parse_args()
    chosen = options.only or range(options.number)
    programs = [program(seed, number) for seed in options.seed for number in chosen]
    with tempfile.TemporaryDirectory(prefix="memlog-leaks-") as folder:
        kept = options.keep or Path(folder)
        results = run(programs, kept.resolve(), options.jobs, again=options.only is not None)
    text = report.text(results)
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    if options.write:
        report.put_into(options.write, text)
    sys.exit(any(result.error for result in results))


def run(
    programs: Sequence[Program], folder: Path, jobs: int, *, again: bool = False
) -> list[Result]:
    """Run programs, ``jobs`` at a time, and return their results.

    What ``folder`` has from an earlier call is not run again, unless ``again`` is true.
    """
    with ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(one, each, folder, again=again): each for each in programs}
        done = track(as_completed(pending), description="programs", total=len(pending))
        results = {pending[each][:2]: each.result() for each in done}
    return [results[each[:2]] for each in programs]


def one(chosen: Program, folder: Path, *, again: bool = False) -> Result:
    """Run a program with the leak, and its twin, and judge what memlog says."""
    own = folder / f"{chosen.seed}-{chosen.number:03}"
    leak, twin = (said_about(chosen, each, own / each, again=again) for each in ("leak", "bounded"))
    try:
        rises = _rises(chosen, folder / "rises")
    except (RuntimeError, subprocess.SubprocessError) as error:
        return Result(chosen, leak, twin, None, str(error)[-400:])
    wrong = leak.error or twin.error
    if rises["bounded"] > (1 - REMOVED) * rises["leak"]:
        wrong = f"the twin grows: {rises}"
    return Result(chosen, leak, twin, None if wrong else judge(chosen, leak, twin, rises), wrong)


def said_about(chosen: Program, variant: Variant, folder: Path, *, again: bool) -> Said:
    """Run one variant of a program with memlog, and return what memlog says."""
    text, known = chosen.text(variant), folder / "said.json"
    file = folder / chosen.file
    if not again and known.exists() and file.exists() and file.read_text() == text:
        return msgspec.json.decode(known.read_bytes(), type=Said)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file.write_text(text)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="memlog-leaks-") as runs:
        recorded = folder / "memlog_runs" if again else Path(runs)
        try:
            said = _with_memlog(chosen, file, recorded)
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            return Said(error=f"{variant}: {type(error).__name__}: {error}"[-800:])
    said = said._replace(seconds=time.perf_counter() - begun)
    known.write_bytes(msgspec.json.encode(said))
    return said


def _with_memlog(chosen: Program, file: Path, folder: Path) -> Said:
    command = [str(MEMLOG), "run", "--layers", "--backend", "local", "--dir", str(folder)]
    with tempfile.TemporaryDirectory(prefix="memlog-leaks-") as place:
        done = subprocess.run(
            [*command, "--", sys.executable, str(file)],
            cwd=place,
            env=environment(0),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if (done.returncode == 0) != (chosen.end == "finish"):
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    [recorded] = list_runs(folder)
    _wait_for_helper(recorded)
    shown = subprocess.run(
        [str(MEMLOG), "show", "latest", "--json", "--dir", str(folder)],
        env=environment(0),
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    document = json.loads(shown.stdout)
    available = document["metrics"].get("memory/host/available_mib", {"max": 0.0})["max"]
    named_at = _named_at(chosen, recorded)
    findings = tuple(findings_of(document))
    return Said(findings, document["verdict"], named_at, free=available * MIB)


def _wait_for_helper(recorded: RunDirectory) -> None:
    """Wait for the process that writes the report of a run whose training was killed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with HelperLock(recorded) as is_free:
            if is_free:
                return
        time.sleep(0.1)
    raise RuntimeError("memlog's helper process has not ended")


def _named_at(chosen: Program, recorded: RunDirectory) -> int | None:
    """Return the step of the first finding in the journal that names the holder."""
    events = (entry.event for file in recorded.files() for entry in file.read())
    steps = [
        each.step
        for each in events
        if isinstance(each, FindingEvent)
        and each.step is not None
        and names_holder(Finding(each.kind, each.title, each.where), chosen)
    ]
    return min(steps, default=None)


def _rises(chosen: Program, folder: Path) -> dict[Variant, float]:
    """Return the bytes by which memory rises in each variant, measured without memlog.

    The programs that are measured leave out the steps that keep nothing. The last third of a run is compared
    with the one before, because the bounded program keeps more and more at first. The rise is the smaller one
    of two: that of the maximum, which a thread can raise that is late for a moment, and that of the median,
    which depends on the point at which a third begins if the program removes all things at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variants: list[Variant] = ["leak", "bounded"]
    if chosen.kept.sort == "graph" or "backward" in chosen.kept.name:
        variants.append("detached")
    return {each: _rise(chosen.text(each, is_short=True), folder) for each in variants}


def _rise(text: str, folder: Path) -> float:
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    known = folder / f"{name}.json"
    if known.exists():
        return float(json.loads(known.read_text()))
    script = folder / f"{name}.py"
    script.write_text(text)
    levels = measure_file(script, variables=_ALLOCATOR).levels
    third = len(levels) // 3
    before, after = levels[third : 2 * third], levels[-third:]
    rise = min(max(after) - max(before), median(after) - median(before))
    known.write_text(json.dumps(rise))
    script.unlink()
    return float(rise)


if __name__ == "__main__":
    main()
