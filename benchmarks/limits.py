"""What long runs take: ``python -m benchmarks.limits [--events N] [--seconds S] [--write FILE]``."""

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

_PREFACE = """# Limits

Written by `make limits`. What bounds a run, and what a long one takes.

"""

_BOUNDS = {
    "the journal of a run": (
        "`journal_limit`, 2 GiB where nothing is said. Beyond it the helper thins closed segments: what "
        "every tracker has had first, then the oldest steps; peaks, alerts, epochs and what is rare stay. "
        "`memlog show` tells how many events went. Without a tracker nothing counts as delivered, and "
        "steps are thinned alike. The newest segment of each process (16 MiB, or an eighth of the "
        "limit) is never touched. While it is half as large again as its limit, because the helper is gone "
        "or too slow, only steps with a new peak are written, and one of 1,000 others."
    ),
    "events that wait for a slow disk": "100,000, about 15 MB; more are dropped and counted",
    "a write that the file system does not finish": "none: the step waits for as long (reliability.md)",
    "a line of the journal": "1 MiB; a longer one is not ours",
    "points that a tracker gets": (
        "every step below 10,000; then ten, then a hundred steps share one, in which peaks are kept: "
        "28,000 a metric for a million steps"
    ),
    "alerts that a tracker shows": "the newest 1,000 of a run",
    "the name of an artifact": "128 characters",
    "`finish`": (
        "10 s (`finish_timeout`), 2 s if no tracker can be reached; "
        "the helper goes on for 120 s more (`linger`), for 20 s after SIGTERM"
    ),
}

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
        time.sleep(0.1)   # until it has come up

    def look():
        sizes.append((trainer.memory_info().rss, helper.memory_info().rss))

    sizes = []
    for step in range(events):
        session.publish(Batch(now_us(), step, 3 * 2**30, 3 * 2**30, "watermark", (reading,)))
        if step % (events // 20) == 0 and step >= events // 10:
            look()
    time.sleep(3)   # the helper has read all of it meanwhile
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

    rate, seconds = int(sys.argv[1]), float(sys.argv[2])
    config = {"memlog": {"bind_grace": 0}}
    session = memlog.init("mlflow", dir="runs", finish_timeout=120, config=config)
    run = RunDirectory(session.directory)

    def remembered():
        return UploadState.load(run, "mlflow")

    def behind():
        [file] = [file for file in run.files() if file.process.startswith("trainer")]
        [written] = run.path.glob("trainer-*")   # some megabytes: one segment
        size = written.stat().st_size
        progress = remembered().files.get(file.process)
        return (size - progress.sent.offset if progress else size) * step / size   # in steps

    begun, step, look, lowest = time.monotonic(), 0, seconds / 2, None
    while (passed := time.monotonic() - begun) < seconds:
        while step < rate * passed:
            session.step()
            step += 1
        if passed >= look:   # in the second half, the client has long been imported
            look += 0.1
            lowest = min(behind(), step if lowest is None else lowest)
        time.sleep(0.002)
    before, ended = remembered().delivered, time.monotonic()
    # Without the end of the run what is open of the last bucket stays open: ten steps at the most.
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
    # Not getrusage: what it tells is at least the size of the process that started this one.
    [peak] = [line for line in Path("/proc/self/status").open() if line.startswith("VmHWM")]
    print(int(peak.split()[1]) * 1024, file=sys.stderr)
"""


def steady(directory: Path, events: int) -> dict[str, float]:
    """Publishes batch events of one device; MiB that two processes grew by, and bytes an event took."""
    told = json.loads(_run(_STEADY, directory, str(events)).stdout)
    grown = [[size - told["sizes"][0][who] for size in column] for who, column in _columns(told)]
    return {
        "trainer_mib": max(map(abs, grown[0])) / 2**20,
        "helper_mib": max(map(abs, grown[1])) / 2**20,
        "bytes_an_event": told["journal"] / events,
    }


def _columns(told: dict[str, Any]) -> list[tuple[int, list[int]]]:
    return list(enumerate(map(list, zip(*told["sizes"], strict=True))))


def keeping_up(directory: Path, rate: int, seconds: float) -> dict[str, Any]:
    """Publishes steps at a rate to MLflow on SQLite: how far behind delivery was, and how long the rest took.

    ``behind_lowest`` is the fewest steps that were not delivered at any look in the second half: what
    piled up while the client was imported has been caught up with, while steps went on coming.
    ``behind_settled`` is what was left after the last step, without the end of the run.
    """
    told: dict[str, Any] = json.loads(_run(_PACED, directory, str(rate), str(seconds)).stdout)
    return told


def peak_mib(directory: Path, *command: str) -> float:
    """The peak resident set of a command of memlog's, in MiB."""
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
    """Peak MiB of reading and of delivering the newest run there."""
    run = find_run(directory / "runs", "latest").id
    where = ("--dir", str(directory / "runs"))
    return {
        "memlog show": peak_mib(directory, "show", run, *where),
        "memlog sync --to mlflow": peak_mib(directory, "sync", run, "--to", "mlflow", *where),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="of a long run")
    parser.add_argument("--seconds", type=float, default=60.0, help="of delivery at 1,000 events/s")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables there, too")
    options = parser.parse_args()
    tables = "\n\n".join([_bounds(), machine(), _long(options.events), _delivery(options.seconds)])
    Console().print(tables, markup=False, highlight=False)
    if options.write:
        options.write.write_text(_PREFACE + tables + "\n")


def _bounds() -> str:
    rows = [f"| {what} | {bound} |" for what, bound in _BOUNDS.items()]
    return "\n".join(["| what | bound |", "|---|---|", *rows])


def _long(events: int) -> str:
    lines = [
        f"A run of {events:,} batch events with one device, against one of {events // 10:,}:\n",
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
        "the trainer's resident set moved by, MiB": f"{figures['trainer_mib']:.1f}",
        "the helper's, MiB": f"{figures['helper_mib']:.1f}",
        "journal, bytes an event": f"{figures['bytes_an_event']:.0f}",
    }


def _rounded(peaks: dict[str, float]) -> dict[str, str]:
    return {f"peak of `{name}`, MiB": f"{peak:.0f}" for name, peak in peaks.items()}


def _delivery(seconds: float) -> str:
    with tempfile.TemporaryDirectory(prefix="memlog-limits-") as folder:
        told = keeping_up(Path(folder), 1_000, seconds)
    share = told["points_before"] / told["points"]
    return (
        f"1,000 events/s for {seconds:g} s to MLflow on SQLite: of {told['points']:,} points {share:.1%} "
        f"were there when the last step was over, and the rest {told['finish_s']:.1f} s later."
    )


if __name__ == "__main__":
    main()
