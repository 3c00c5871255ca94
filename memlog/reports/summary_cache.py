"""Keeping a run's summary beside its journal, so that listing a thousand runs reads no journal twice."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from memlog._internal.safe_files import read_plain, replacing
from memlog._version import __version__
from memlog.journal import RunDirectory
from memlog.journal.format import UNDECODABLE
from memlog.reports.schema import Summary

_FILE = "summary.json"
_MAX_BYTES = 64 * 1024**2


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A summary, and what it was made of and by."""

    version: str
    sizes: dict[str, int]
    """Of the journal's files, in bytes: it is only ever appended to."""
    summary: Summary


class SummaryCache:
    """What is kept of one run, good for its journal as it is when this object is made."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._sizes = {path.name: path.lstat().st_size for path in run.path.glob("*.jsonl")}

    def load(self, *, alive: bool) -> Summary | None:
        """The summary; ``None`` where none is kept that still holds."""
        try:
            kept = msgspec.json.decode(read_plain(self._run.path, _FILE, _MAX_BYTES), type=_Kept)
        except (OSError, *UNDECODABLE):
            return None
        if kept.version != __version__ or kept.sizes != self._sizes:
            return None
        if kept.summary.run.directory != str(self._run.path):
            return None  # the folder was copied or moved
        # Another machine can't tell a run that is silent from one that is gone.
        return None if alive and kept.summary.status == "killed" else kept.summary

    def save(self, summary: Summary) -> None:
        """Keeps the summary of a run that is over; a folder that can't be written does without."""
        kept = _Kept(version=__version__, sizes=self._sizes, summary=summary)
        with suppress(OSError), replacing(self._run.path, _FILE) as file:
            file.write(msgspec.json.encode(kept))
