"""Real journals of made-up runs, written as a trainer and its helper write them."""

from pathlib import Path

import msgspec

from memlog._internal.diagnostics import Diagnostics as Counts
from memlog._internal.processes import RankPosition
from memlog.events import (
    Alert,
    Artifact,
    Batch,
    Device,
    DeviceReading,
    End,
    Epoch,
    Evaluation,
    Event,
    Health,
    Loss,
    Parameters,
    Recorded,
    Run,
    Sample,
    Scope,
)
from memlog.journal import Binding, JournalWriter, ProcessIdentity, RunDirectory
from memlog.journal.format import Role
from memlog.ranks.registration import register

BEGUN_US = 1_790_000_000_000_000
"""2026-09-21 14:13:20 UTC."""
GIB = 1024**3
MIB = 1024**2


class MadeRun:
    """A run's folder with the trainer's journal and, after a call of `sampled`, the helper's.

    The run's trainer has ended. With ``alive``, the trainer is this process.
    """

    def __init__(
        self,
        root: Path,
        run_id: str = "k7m2xq9a",
        *,
        alive: bool = False,
        segment_bytes: int = 4096,
    ) -> None:
        self._segment_bytes = segment_bytes
        self.directory = RunDirectory(root / run_id)
        self.directory.delivery.mkdir(parents=True)
        self._alive = alive
        self.trainer = self._writer("trainer")
        self.helper: JournalWriter | None = None

    def write(self, *events: Event) -> "MadeRun":
        for event in events:
            self.trainer.append(event)
        return self

    def ranked(self, position: RankPosition, begun: float = 0) -> "MadeRun":
        """Make this the run of one of the ranks that train together."""
        register(self.directory, position, BEGUN_US + int(begun * 1e6))
        return self

    def sampled(self, *events: Event) -> "MadeRun":
        self.helper = self.helper or self._writer("helper")
        for event in events:
            self.helper.append(event)
        return self

    def bound(
        self, backend: str, run_id: str, uri: str | None, name: str | None = None
    ) -> "MadeRun":
        """Let later events belong to a run of the user's."""
        self.trainer.bind(backend, Binding(run_id, uri, name))
        return self

    def closed(self) -> RunDirectory:
        """End the journals; a trainer that is not alive gets the identity of a process that is gone."""
        for writer in (self.trainer, self.helper):
            if writer is not None:
                writer.close()
        if not self._alive:
            bury(self.directory)
        return self.directory

    def _writer(self, role: Role) -> JournalWriter:
        return JournalWriter(
            self.directory.path,
            run=self.directory.id,
            role=role,
            begun_us=BEGUN_US,
            segment_bytes=self._segment_bytes,
            diagnostics=Counts(),
        )


def bury(run: RunDirectory) -> None:
    """Give a run of this process the identity of a process that is gone: its start time is in 1970."""
    own = ProcessIdentity.own()
    gone = msgspec.structs.replace(own, started=0.0, ticks=0 if own.ticks else None)
    before, after = msgspec.json.encode(own), msgspec.json.encode(gone)
    for path in run.path.glob("*.jsonl"):
        path.write_bytes(path.read_bytes().replace(before, after))


def at(seconds: float) -> int:
    """Return a time after the run's start as Unix time in microseconds."""
    return BEGUN_US + round(seconds * 1e6)


def batch(step: int, rss: int | None, *devices: DeviceReading) -> Batch:
    """Return a batch event. Steps take 0.1 s, and the resident set is at its peak."""
    return Batch(at(step / 10), step, rss, rss, "exact" if rss else None, devices)


def cuda(allocated: int, peak: int | None = None, index: int = 0) -> DeviceReading:
    """A reading of a device that reserves twice as many bytes as it allocates."""
    peak = allocated if peak is None else peak
    return DeviceReading(f"cuda{index}", allocated, 2 * allocated, peak, "exact", allocated // 10)


def full_run(root: Path, run_id: str = "k7m2xq9a") -> MadeRun:
    """Return an open run with events of every kind."""
    made = MadeRun(root, run_id)
    made.write(
        Run(at(0), "gpt-small", "language", ("mlflow",), {"every": "1"}),
        Parameters(at(0.1), {"torch": "2.13.0", "python": "3.11.4", "model": "GPT"}),
    )
    made.bound("mlflow", "3f2a9c", "http://tracker:5000")
    made.write(Device(at(0.2), "cuda0", "NVIDIA H100 80GB HBM3", 80 * GIB))
    for step in range(200):
        made.write(batch(step, GIB + step * MIB, cuda(GIB, GIB + min(step, 120) * MIB)))
        made.write(Loss(at(step / 10 + 0.05), step, 4.0 - step / 100))
    made.write(
        Evaluation(at(20.1), 0, 3.5, GIB, (cuda(GIB),)),
        Evaluation(at(20.2), 1, 2.5, GIB, (cuda(GIB),), error="ValueError"),
        Scope(at(20.3), "load", 1500, 90 * GIB),
        Recorded(at(20.4), "after load", GIB),
        Epoch(at(20.5), 0, 199, GIB, GIB + 199 * MIB, "watermark", (cuda(GIB),)),
        Alert(at(20.6), 150, "warning", "host.rss > 1 GiB", "Host memory", "rss is 1.1 GiB", 1.1),
        Artifact(at(20.7), "flame graph", "flamegraph", "artifacts/flame.svg", 123_456),
        Health(at(20.8), 199, 0.012, 2.5, {"journal_write": 2}, {"reading cuda0: OSError": 1}),
    )
    made.sampled(
        Sample(at(0.05), None, 3 * GIB, 2, 8 * GIB, None, None),
        Sample(at(10), 99, 2 * GIB, 3, 7 * GIB, GIB, 16 * GIB),
        Sample(at(19), 190, 2 * GIB + 1, 3, 6 * GIB, GIB, 16 * GIB),
    )
    return made


def finished_run(root: Path, run_id: str = "k7m2xq9a") -> RunDirectory:
    return full_run(root, run_id).write(End(at(21), "finished")).closed()
