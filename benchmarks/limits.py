"""Measure long runs: ``python -m benchmarks.limits [--events N] [--seconds S] [--write FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.__main__ import machine
from memlog.journal import find_run

_PREFACE = """# What a long run takes

Written by `make limits`. The bounds are in [limits](../limits.md).

"""

_STEADY = """
    import json
    import sys
    import time

    import psutil

    import memlog
    from memlog.events import Batch, DeviceReading, now_us

    events = int(sys.argv[1])
    session = memlog.init("local", dir="runs", finish_timeout=120)
    trainer = psutil.Process()
    helper = psutil.Process(session._live._helper.pid)
    reading = DeviceReading("cuda0", 40 * 2**30, 60 * 2**30, 50 * 2**30, "watermark", 2**30)
    deadline = time.monotonic() + 60
    while not any(b'"sample"' in path.read_bytes() for path in session.directory.glob("helper-*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)   # until the helper has started

    def look():
        sizes.append((trainer.memory_info().rss, helper.memory_info().rss))

    sizes = []
    for step in range(events):
        session.publish(Batch(now_us(), step, 3 * 2**30, 3 * 2**30, "watermark", (reading,)))
        if step % (events // 20) == 0 and step >= events // 10:
            look()
    time.sleep(3)   # until the helper has read all events
    look()
    session.finish()
    journal = sum(path.stat().st_size for path in session.directory.glob("trainer-*"))
    print(json.dumps({"sizes": sizes, "journal": journal}))
"""

_PACED = """
    import json
    import sys
    import time

    import memlog
    from memlog.journal.delivery_state import UploadState
    from memlog.journal import RunDirectory
    from memlog.journal.reader import used_bytes

    rate, seconds = int(sys.argv[1]), float(sys.argv[2])
    config = {"memlog": {"bind_grace": 0}}
    session = memlog.init("mlflow", dir="runs", finish_timeout=120, config=config)
    run = RunDirectory(session.directory)

    def remembered():
        return UploadState.load(run, "mlflow")

    def behind():
        [file] = run.files("trainer")
        [written] = run.path.glob("trainer-*")   # some megabytes: one segment
        size = used_bytes(written)
        progress = remembered().files.get(file.process)
        return (size - progress.sent.offset if progress else size) * step / size   # in steps

    begun, step, look, lowest = time.monotonic(), 0, seconds / 2, None
    while (passed := time.monotonic() - begun) < seconds:
        while step < rate * passed:
            session.step()
            step += 1
        if passed >= look:   # in the second half, when the client is imported
            look += 0.1
            lowest = min(behind(), step if lowest is None else lowest)
        time.sleep(0.002)
    before, ended = remembered().delivered, time.monotonic()
    # The last bucket of up to ten steps is sent when the run ends.
    while (settled := behind()) > 20 and time.monotonic() < ended + 60:
        time.sleep(0.1)
    session.finish()
    after = remembered()
    print(json.dumps({
        "steps": step,
        "behind_lowest": lowest,
        "behind_settled": settled,
        "points_before": before,
        "points": after.delivered,
        "stage": after.stage,
        "finish_s": time.monotonic() - ended,
    }))
"""

_PEAK = """
    import sys
    from pathlib import Path

    sys.argv = ["memlog", *sys.argv[1:]]
    from memlog.cli.main import main

    try:
        main()
    except SystemExit as end:
        assert not end.code, end
    # Not getrusage: its peak is at least the size of the process that started this one.
    [peak] = [line for line in Path("/proc/self/status").open() if line.startswith("VmHWM")]
    print(int(peak.split()[1]) * 1024, file=sys.stderr)
"""


def steady(directory: Path, events: int) -> dict[str, float]:
    """Publish batch events. Return the largest memory change of each process, and the bytes per event."""
    result = json.loads(_run(_STEADY, directory, str(events)).stdout)
    trainer, helper = (
        max(abs(size - sizes[0]) for size in sizes) for sizes in zip(*result["sizes"], strict=True)
    )
    return {
        "trainer_mib": trainer / 2**20,
        "helper_mib": helper / 2**20,
        "bytes_an_event": result["journal"] / events,
    }


def keeping_up(directory: Path, rate: int, seconds: float) -> dict[str, Any]:
    """Publish steps at a rate to MLflow on SQLite, and measure how far delivery was behind.

    ``behind_lowest`` is the smallest number of undelivered steps in the second half of the time. In the first
    half, delivery catches up with the steps that were published while MLflow's client was imported.
    ``behind_settled`` is the number of undelivered steps before the run ends. It is read when at most 20 are
    left, or 60 s after the last step.
    """
    result: dict[str, Any] = json.loads(_run(_PACED, directory, str(rate), str(seconds)).stdout)
    return result


def peak_mib(directory: Path, *command: str) -> float:
    """Run a memlog command and return its peak resident set in MiB."""
    done = _run(_PEAK, directory, *command)
    return int(done.stderr.splitlines()[-1]) / 2**20


def _run(script: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(script))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=directory,
        env={**kept, "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def commands(directory: Path) -> dict[str, float]:
    """Return the peak MiB of `memlog show` and of `memlog sync`, each on the newest run in a directory."""
    run = find_run(directory / "runs", "latest").id
    where = ("--dir", str(directory / "runs"))
    return {
        "memlog show": peak_mib(directory, "show", run, *where),
        "memlog sync --to mlflow": peak_mib(directory, "sync", run, "--to", "mlflow", *where),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the long run")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds of delivery at 1,000 events/s"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables to FILE")
    options = parser.parse_args()
    tables = "\n\n".join([machine(), _long(options.events), _delivery(options.seconds)])
    Console().print(tables, markup=False, highlight=False)
    if options.write:
        options.write.write_text(_PREFACE + tables + "\n")


def _long(events: int) -> str:
    lines = [
        f"Two runs, of {events // 10:,} and of {events:,} batch events (one event per step), with one device "
        "each:\n",
        f"| | {events // 10:,} | {events:,} |",
        "|---|---|---|",
    ]
    columns = []
    for count in (events // 10, events):
        with tempfile.TemporaryDirectory(prefix="memlog-limits-") as folder:
            figures = steady(Path(folder), count)
            columns.append({**_named(figures), **_rounded(commands(Path(folder)))})
    lines += [f"| {name} | {columns[0][name]} | {columns[1][name]} |" for name in columns[0]]
    return "\n".join(lines)


def _named(figures: dict[str, float]) -> dict[str, str]:
    return {
        "change of the training process's resident set, MiB": f"{figures['trainer_mib']:.1f}",
        "change of the helper process's resident set, MiB": f"{figures['helper_mib']:.1f}",
        "journal, bytes per event": f"{figures['bytes_an_event']:.0f}",
    }


def _rounded(peaks: dict[str, float]) -> dict[str, str]:
    return {f"peak of `{name}`, MiB": f"{peak:.0f}" for name, peak in peaks.items()}


def _delivery(seconds: float) -> str:
    with tempfile.TemporaryDirectory(prefix="memlog-limits-") as folder:
        result = keeping_up(Path(folder), 1_000, seconds)
    share = result["points_before"] / result["points"]
    return (
        f"1,000 events/s for {seconds:g} s to MLflow on SQLite: of {result['points']:,} points {share:.1%} "
        f"were delivered when the last step ended, and the rest {result['finish_s']:.1f} s later."
    )


if __name__ == "__main__":
    main()
