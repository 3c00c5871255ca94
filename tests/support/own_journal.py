"""Journal that the test's own process writes."""

import os
from pathlib import Path

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Event
from memlog.journal import JournalFile, JournalWriter


def batch(step: int) -> Batch:
    return Batch(1_795_000_000_000_000 + step, step, 2**30, 2**30, "watermark")


def writer(
    directory: Path, health: Diagnostics | None = None, *, begun_us: int = 1, **options: int
) -> JournalWriter:
    return JournalWriter(
        directory,
        run=directory.name,
        role="trainer",
        begun_us=begun_us,
        diagnostics=health or Diagnostics(),
        **options,
    )


def reader(directory: Path) -> JournalFile:
    return JournalFile(directory, f"trainer-{os.getpid()}")


def events(directory: Path) -> list[Event]:
    return [entry.event for entry in reader(directory).read()]


def segment(directory: Path, number: int = 1) -> Path:
    return directory / f"trainer-{os.getpid()}-{number:04d}.jsonl"
