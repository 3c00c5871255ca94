"""HTML page of a CUDA allocator's snapshot. Trackers can't show the snapshot, because it is a pickle file."""

from __future__ import annotations

from memlog.artifacts.journal_store import kept
from memlog.artifacts.snapshots import parse_snapshot
from memlog.events import Artifact
from memlog.journal import RunDirectory
from memlog.journal.artifacts import keep_text, open_artifact
from memlog.trace import exporters

SNAPSHOT = "out-of-memory.pickle"
"""Name of the snapshot that memlog saves at a failed allocation."""
KIND = "snapshot"
PAGE = "out-of-memory.html"
_MAX_BYTES = 256 * 1024**2
_INTRO = (
    "Each bar is a frame of the stack that allocated memory, as wide as the bytes that were in use when the "
    "snapshot was taken."
)


def keep_page(run: RunDirectory) -> Artifact | None:
    """Write a page of the memory in use in the snapshot.

    Returns:
        The event that describes the page; ``None`` if the snapshot is missing or too large.

    Raises:
        SnapshotError: The snapshot is damaged, or holds no allocation.
        OSError: The page can't be written.
    """
    snapshot = next((file for file in kept(run)[::-1] if file.name == SNAPSHOT), None)
    file = None if snapshot is None else open_artifact(run, snapshot)
    if file is None:
        return None
    with file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        return None
    graph = exporters.snapshot_graph(parse_snapshot(content, SNAPSHOT), SNAPSHOT)
    page = exporters.flame_page(graph.document, intro=_INTRO, holder="innermost frame")
    return None if page is None else keep_text(run, page, PAGE, KIND)
