"""Readings of the process's memory that a tool has left on the disk."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from memlog._internal.terminal import MIB


class Reading(NamedTuple):
    """Memory of the process in MiB, and the step; ``None`` if the tool does not record the value."""

    mib: float | None
    step: int | None


def none(_folder: Path) -> Iterator[Reading]:
    yield from ()


def memlog(folder: Path) -> Iterator[Reading]:
    """Read the resident set of each step from the journal, or the kernel's watermark if it is higher."""
    from memlog.events import Batch
    from memlog.journal import list_runs

    (run,) = list_runs(folder / "memlog_runs")
    for file in run.files():
        for entry in file.read():
            if isinstance(entry.event, Batch):
                yield Reading(
                    max(entry.event.rss or 0, entry.event.rss_peak or 0) / MIB, entry.event.step
                )


def mlflow(folder: Path) -> Iterator[Reading]:
    """Count readings of the machine's memory. MLflow does not read the memory of the process."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        rows = database.execute(
            "select step from metrics where key = 'system/system_memory_usage_megabytes'"
        ).fetchall()
    for _ in rows:
        yield Reading(None, None)  # MLflow's step is the reading's number, not the training's step


def wandb(folder: Path) -> Iterator[Reading]:
    """Search W&B's own file of an offline run for the readings: it has their keys and values as text."""
    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        for found in re.findall(
            rb"proc\.memory\.rssMB[^0-9]{1,4}([0-9]+\.?[0-9]*)", file.read_bytes()
        ):
            yield Reading(float(found), None)


def stormlog(folder: Path) -> Iterator[Reading]:
    for file in (folder / "stormlog").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            yield Reading(json.loads(line)["allocator_allocated_bytes"] / MIB, None)


def traceml(folder: Path) -> Iterator[Reading]:
    for file in folder.glob("logs/*/aggregator/telemetry"):
        with sqlite3.connect(file) as database:
            for (used,) in database.execute("select ram_used_bytes from process_samples"):
                yield Reading(used / MIB, None)


def device_stats(folder: Path) -> Iterator[Reading]:
    """Count readings of the machine's memory. On a CPU, the monitor does not read the process's memory."""
    for file in folder.glob("lightning_logs/*/metrics.csv"):
        head, *rows = (line.split(",") for line in file.read_text().splitlines())
        at = next(i for i, name in enumerate(head) if name.endswith("batch_end/cpu_vm_percent"))
        for row in rows:
            if row[at]:
                yield Reading(None, int(row[head.index("step")]))


def composer(folder: Path) -> Iterator[Reading]:
    """Count readings of the machine's memory: `MemoryMonitor` reads CUDA only."""
    log = folder / "composer.log"
    for step in re.findall(
        r"batch=(\d+)\]: cpu_memory_used", log.read_text() if log.exists() else ""
    ):
        yield Reading(None, int(step))


READERS: dict[str, Callable[[Path], Iterator[Reading]]] = {
    "memlog": memlog,
    "memlog, to MLflow": memlog,
    "MLflow system metrics": mlflow,
    "W&B system metrics": wandb,
    "stormlog": stormlog,
    "TraceML": traceml,
    "Lightning, memlog": memlog,
    "Lightning, DeviceStatsMonitor": device_stats,
    "Composer, its two monitors": composer,
}


_TEXT = (".txt", ".log", ".json", ".md")


def text_about(folder: Path, printed: str) -> str:
    """Return all text that a tool has printed or written, without source code that it copied."""
    files = (file for file in folder.rglob("*") if file.suffix in _TEXT and file.is_file())
    return "\n".join([printed, *(file.read_text(errors="replace") for file in files)])
