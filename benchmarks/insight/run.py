"""Run the scripts through ``memlog run --layers`` and judge memlog's findings.

``python -m benchmarks.insight.run [--only NAME …] [--seeds N] [--jobs N] [--device cuda] [--keep FILE]
[--write FILE]``
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import track

from benchmarks.insight import report
from benchmarks.insight.expected import Expected, load, marked_lines
from benchmarks.insight.scoring import Finding, Score, Truth, findings_of, judge
from benchmarks.insight.series import MIB, SCRIPTS, environment, measure

TIMEOUT_S = 600
MEMLOG = Path(sys.executable).with_name("memlog")


class Result(NamedTuple):
    """Result of one script with one seed.

    Attributes:
        name: Name of the script.
        seed: Seed of the script's random numbers.
        score: Judgement of the findings; None if the script failed.
        findings: memlog's findings.
        verdict: memlog's verdict, if it gave one.
        cost: Time with memlog divided by the time without memlog; None if not measured.
        rate: Measured growth in bytes per step; None if not measured.
        error: Message of the failure; None if the script did not fail.
    """

    name: str
    seed: int
    score: Score | None
    findings: tuple[Finding, ...] = ()
    verdict: str | None = None
    cost: float | None = None
    rate: float | None = None
    error: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scripts (default: all)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of healthy scripts (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time (default 1)")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep results in FILE, and run what it lacks"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are (default cpu)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the report to FILE")
    options = parser.parse_args()
    table = load()
    names = options.only or sorted(table)
    if unknown := set(names) - set(table):
        parser.error(f"no such script: {', '.join(sorted(unknown))}")
    left_out = [name for name in names if options.device != "cpu" and table[name].not_on_device]
    names = [name for name in names if name not in left_out]
    results = run(table, names, options.seeds, options.jobs, options.keep, options.device)
    not_run = sorted(set(table) - set(names) - set(left_out))
    text = report.text(table, results, options.seeds, left_out, not_run)
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    if options.write:
        report.put_into(options.write, text, options.device)
    sys.exit(any(result.error for result in results))


def run(
    table: dict[str, Expected],
    names: Sequence[str],
    seeds: int,
    jobs: int,
    keep: Path | None = None,
    device: str = "cpu",
) -> list[Result]:
    """Run scripts: the faulty ones with seed 0, the healthy ones with all seeds.

    Scripts run seed by seed, so that an interrupted benchmark has complete seeds. Runs whose result is in the
    file ``keep`` are left out; new results are added to the file, one per line.
    """
    kept = keep.read_bytes().splitlines() if keep is not None and keep.exists() else []
    results = {
        (r.name, r.seed): r for r in (msgspec.json.decode(line, type=Result) for line in kept)
    }
    tasks = [
        (name, seed) for name in names for seed in range(1 if table[name].faulty else max(seeds, 1))
    ]
    with ThreadPoolExecutor(jobs) as pool:
        pending = [
            pool.submit(one, name, table[name], seed, device)
            for name, seed in sorted(tasks, key=itemgetter(1))
            if (name, seed) not in results
        ]
        for future in track(as_completed(pending), description="scripts", total=len(pending)):
            result = future.result()
            results[result.name, result.seed] = result
            if keep is not None and result.error is None:
                with keep.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
    return [results[task] for task in tasks]


def one(name: str, expected: Expected, seed: int, device: str = "cpu") -> Result:
    """Run one script with one seed: with memlog and, for the first seed, also without.

    On a device, the script does not run without memlog: a simulated device takes no time, so the comparison
    would mean nothing.
    """
    try:
        is_timed = seed == 0 and device == "cpu"
        plain = _timed(_command(name, device), seed) if is_timed else None
        seconds, document = _with_memlog(name, seed, device)
        findings = findings_of(document)
        truth = _truth(name, seed, findings, document, device) if expected.grows else None
    except Exception as error:  # noqa: BLE001 # reported as this script's result
        return Result(name, seed, None, error=f"{type(error).__name__}: {error}"[-500:])
    marks = [f"{name}.py:{line}" for line in marked_lines(name)]
    return Result(
        name,
        seed,
        judge(expected, findings, truth, marks),
        tuple(findings),
        document.get("verdict"),
        cost=seconds / plain if plain else None,
        rate=truth.rate if truth else None,
    )


def _command(name: str, device: str) -> list[str]:
    script = str(SCRIPTS / f"{name}.py")
    if device == "cpu":
        return [sys.executable, script]
    return [sys.executable, "-m", "benchmarks.insight.on_device", device, script]


def _with_memlog(name: str, seed: int, device: str) -> tuple[float, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="memlog-insight-") as folder:
        recorded = [str(MEMLOG), "run", "--layers", "--backend", "local", "--dir", folder, "--"]
        seconds = _timed(recorded + _command(name, device), seed)
        shown = subprocess.run(
            [str(MEMLOG), "show", "latest", "--json", "--dir", folder],
            env=environment(seed),
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        return seconds, json.loads(shown.stdout)


def _timed(command: Sequence[str], seed: int) -> float:
    """Run a command in an empty folder and return its seconds.

    Raises:
        RuntimeError: The command failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="memlog-insight-") as folder:
        begun = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(seed),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        seconds = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return seconds


def _truth(
    name: str, seed: int, findings: Sequence[Finding], document: dict[str, Any], device: str
) -> Truth | None:
    """Measure the growth without memlog, if there is a finding to compare with it."""
    if not any(finding.tells_growth for finding in findings):
        return None
    series = measure(name, seed, device=device)
    room = _room(findings, document)
    return Truth(series.rate(), len(series.levels) - 1, room)


def _room(findings: Sequence[Finding], document: dict[str, Any]) -> float | None:
    """Return the bytes that were left until the limit when the run ended, or ``None`` if unknown.

    If no forecast names a limit, the machine's available memory is returned.
    """
    metrics = document.get("metrics", {})
    device = _device_of(findings)
    in_use = f"memory/{device}/allocated_mib" if device else "memory/host/rss_mib"
    forecasts = [finding.forecast for finding in findings if finding.forecast is not None]
    limits = [each.limit_bytes for each in forecasts if each.limit_bytes is not None]
    resident = metrics.get(in_use)
    if limits and resident:
        return float(limits[0] - resident["last"] * MIB)
    available = metrics.get("memory/host/available_mib")
    return float(available["last"] * MIB) if available else None


def _device_of(findings: Sequence[Finding]) -> str | None:
    """Return the device whose memory the first finding with a forecast is about; None: the host."""
    for finding in findings:
        if finding.forecast is not None:
            found = re.search(
                r"\bmemory(?: that tensors hold)? on (\w+)",
                "\n".join((finding.title, *finding.evidence)),
                re.IGNORECASE,
            )
            return found[1] if found else None
    return None


if __name__ == "__main__":
    main()
