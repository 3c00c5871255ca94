"""Keeping a run's summary beside its journal, so that listing a thousand runs reads no journal twice."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from memlog._version import __version__
from memlog.analysis.document import Summary
from memlog.journal import RunDirectory

_FILE = "summary.json"


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A summary, and what it was made of and by."""

    version: str
    sizes: dict[str, int]
    """Of the journal's files, in bytes: it is only ever appended to."""
    summary: Summary


def remembered(run: RunDirectory, *, alive: bool) -> Summary | None:
    """What was kept of the journal as it is now; ``None`` where nothing was."""
    try:
        kept = msgspec.json.decode((run.path / _FILE).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None
    if kept.version != __version__ or kept.sizes != _sizes(run):
        return None
    summary = kept.summary
    if summary.run.directory != str(run.path):  # the folder was copied or moved
        return None
    # Another machine can't tell a run that is silent from one that is gone.
    return None if alive and summary.status == "killed" else summary


def keep(run: RunDirectory, summary: Summary) -> None:
    """Keeps the summary of a run that is over; a folder that can't be written does without."""
    kept = _Kept(version=__version__, sizes=_sizes(run), summary=summary)
    temporary = run.path / f"{_FILE}.tmp"
    with suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(kept))
        temporary.replace(run.path / _FILE)


def _sizes(run: RunDirectory) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in run.path.glob("*.jsonl")}
