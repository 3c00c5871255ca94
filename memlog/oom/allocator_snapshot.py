"""Snapshot of a CUDA allocator at a failed allocation, saved as one of the run's files."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memlog.events import Artifact
from memlog.journal import RunDirectory
from memlog.journal.artifacts import keep
from memlog.probes.allocators import records_history, segments_without_history
from memlog.trace.exporters import write_pickle

FILE = "out-of-memory.pickle"
KIND = "snapshot"


def allocator_snapshot(*, tracing: bool) -> Any:
    """Return torch's snapshot of the allocator; ``None`` if no snapshot is taken.

    The call allocates no device memory.

    If torch records a history of allocations while memlog does not trace the current step, the user has
    started the recording. The user's history can have millions of entries, so the snapshot is taken without
    the history. If this version of torch can't leave out the history, no snapshot is taken.
    """
    torch: Any = sys.modules["torch"]
    if tracing or not records_history(torch):
        return torch.cuda.memory._snapshot()  # noqa: SLF001 - no public way
    segments = segments_without_history(torch)
    return None if segments is None else {"segments": segments, "device_traces": []}


def keep_snapshot(run: RunDirectory, snapshot: Any) -> Artifact:
    """Write a snapshot into the run's folder. An earlier snapshot in the folder is replaced.

    Raises:
        OSError: The file can't be written.
    """
    for history in snapshot["device_traces"]:
        for entry in history:
            entry.setdefault("frames", [])  # required by PyTorch's memory viewer page
    with TemporaryDirectory() as folder:
        return keep(run, write_pickle(snapshot, Path(folder) / FILE), FILE, KIND)
