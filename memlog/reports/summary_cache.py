"""Cache a run's summary beside its journal, so that listing runs reads each journal once."""

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
    version: str
    """Version of memlog that made the summary."""
    sizes: dict[str, int]
    """Bytes of the journal of each process, by its name. Any change of the journal changes a size."""
    summary: Summary


class SummaryCache:
    """Cached summary of one run, valid for the journal as it was when this object was created."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._sizes = {file.process: file.size for file in run.files()}

    def load(self, *, alive: bool) -> Summary | None:
        """Return the cached summary; ``None`` if there is none, or if the cached one is outdated."""
        try:
            kept = msgspec.json.decode(read_plain(self._run.path, _FILE, _MAX_BYTES), type=_Kept)
        except (OSError, *UNDECODABLE):
            return None
        if kept.version != __version__ or kept.sizes != self._sizes:
            return None
        if kept.summary.run.directory != str(self._run.path):
            return None  # the folder was copied or moved
        # A run on another machine counts as killed if it writes nothing for a while. It can still be alive.
        return None if alive and kept.summary.status == "killed" else kept.summary

    def save(self, summary: Summary) -> None:
        """Save the summary of a run that is over; do nothing if the folder can't be written."""
        kept = _Kept(version=__version__, sizes=self._sizes, summary=summary)
        with suppress(OSError), replacing(self._run.path, _FILE) as file:
            file.write(msgspec.json.encode(kept))
