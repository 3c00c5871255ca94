"""Measure many ranks with generated journals: ``python -m benchmarks.ranks [--ranks N] [--steps N]``.

The journals are like those that trainers write, with one device; all ranks make each step at the same time.
The benchmark measures the search for the ranks' runs, the first reading of all journals, a reading after one
more step of every rank, and a reading when nothing is new. With ``--uri`` the points of rank 0's run are
delivered to that MLflow server. ``--write`` puts the table into a page such as docs/project/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import RankPosition
from memlog.delivery.helper.rank_journal import RankJournal
from memlog.delivery.uploader.uploader import Uploader
from memlog.events import Batch, DeviceReading, End
from memlog.journal import JournalWriter, RunDirectory
from memlog.ranks.registration import Training, register
from memlog.sink import Connection, load_backend

_GIB = 1024**3
_BEGUN_US = 1_790_000_000_000_000


class Job:
    """Generated runs of the ranks of one training, still open."""

    def __init__(self, root: Path, ranks: int) -> None:
        self._steps = 0
        self.runs: list[RunDirectory] = []
        self._diagnostics = Diagnostics()
        for rank in range(ranks):
            run = RunDirectory(root / f"rank{rank:04d}")
            run.delivery.mkdir(parents=True)
            register(run, RankPosition(rank, ranks, "a training", rank % 8), _BEGUN_US + rank)
            self.runs.append(run)
        self._writers = [self._writer(run) for run in self.runs]

    def _writer(self, run: RunDirectory) -> JournalWriter:
        return JournalWriter(
            run.path,
            run=run.id,
            role="trainer",
            begun_us=_BEGUN_US,
            diagnostics=self._diagnostics,
        )

    def train(self, steps: int) -> None:
        """Write the steps of all ranks."""
        for step in range(self._steps, self._steps + steps):
            for rank, writer in enumerate(self._writers):
                size = 40 * _GIB + rank * 1024**2
                device = DeviceReading("cuda0", size, size + _GIB, size + _GIB, "exact", 0)
                when = _BEGUN_US + step * 100_000 + rank
                writer.append(Batch(when, step, 2 * _GIB, 2 * _GIB, "exact", (device,)))
        self._steps += steps

    def end(self) -> None:
        """End all runs."""
        for writer in self._writers:
            writer.append(End(_BEGUN_US + self._steps * 100_000, "finished"))
            writer.close()


def _seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return round(time.process_time() - before, 4)


def measure(ranks: int, steps: int, uri: str | None) -> dict[str, float]:
    """Return processor seconds, bytes and, with a server, the seconds of delivery."""
    # This process opens the journals of all ranks. In a training, a rank's process opens only its own.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, ranks + 500), hard))
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), ranks)
        job.train(steps)
        own = Training(
            job.runs[0], register(job.runs[0], RankPosition(0, ranks, "a training", 0), _BEGUN_US)
        )
        found: dict[str, float] = {"ranks": ranks, "steps": steps}
        found["search_s"] = _seconds(own.search)
        journal = RankJournal(job.runs[0], own.own, _BEGUN_US, 0, Diagnostics())
        found["first_reading_s"] = _seconds(lambda: journal.look(search=True))
        job.train(1)
        found["one_step_s"] = _seconds(journal.look)
        found["nothing_new_s"] = _seconds(journal.look)
        found["search_again_s"] = _seconds(lambda: journal.look(search=True))
        job.end()
        journal.publish_rest()
        written = sum(path.stat().st_size for path in job.runs[0].path.glob("ranks-*"))
        found["bytes_a_step"] = round(written / (steps + 1))
        found["resident_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        if uri is not None:
            found |= _delivered(job.runs[0], uri)
    return found


def _delivered(run: RunDirectory, uri: str) -> dict[str, float]:
    backend = load_backend("mlflow")
    backend.prepare()
    uploader = Uploader(run, "mlflow", backend.open_sink, may_open_own=True)
    uploader.connect(Connection(uri))
    before, processor = time.perf_counter(), time.process_time()
    points = uploader.deliver(complete=True)
    uploader.close()
    return {
        "points": points,
        "delivery_s": round(time.perf_counter() - before, 2),
        "delivery_processor_s": round(time.process_time() - processor, 2),
    }


ROWS = {
    "search_s": "find the ranks' runs the first time, s",
    "first_reading_s": "read all journals the first time, s",
    "one_step_s": "read when every rank has made one more step, s",
    "nothing_new_s": "read when nothing is new, s",
    "search_again_s": "search again for new ranks and ended processes, s",
    "resident_mib": "memory of the measuring process with all open journals, MiB",
    "bytes_a_step": "bytes in rank 0's run, a step",
}
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"


def table(measured: Sequence[Mapping[str, float]]) -> str:
    """Return the measurements as a table of Markdown, a column for each number of ranks."""
    # Imported here, because its own imports would count as measured memory.
    from benchmarks.__main__ import machine

    steps = {found["steps"] for found in measured}
    lines = [
        ["", *(f"{found['ranks']:,} ranks" for found in measured)],
        ["---"] * (len(measured) + 1),
    ]
    lines += [[text, *(f"{found[name]:g}" for found in measured)] for name, text in ROWS.items()]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    number = " or ".join(f"{each:,}" for each in sorted(steps))
    return f"{machine()} {number} steps in each journal.\n\n{rows}"


def main() -> None:
    """Print one JSON document for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 100, 1000])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--uri", help="an MLflow server")
    parser.add_argument("--write", type=Path, help="a page in which to replace the table")
    arguments = parser.parse_args()
    measured = []
    for ranks in arguments.ranks:
        measured.append(measure(ranks, arguments.steps, arguments.uri))
        print(json.dumps(measured[-1]), flush=True)
    if arguments.write is not None:
        before, _, rest = arguments.write.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        arguments.write.write_text(f"{before}{BEGIN}\n\n{table(measured)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
