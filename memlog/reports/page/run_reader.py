"""One pass over a run's journal for the whole report. The pass can continue while the journal grows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from memlog.events import End
from memlog.journal import Entry, JournalFile, Position, RunDirectory
from memlog.journal.format import START
from memlog.reports.accumulator import Accumulator
from memlog.reports.page.facts import SeriesFold
from memlog.reports.schema import Summary
from memlog.reports.step_ranking import RankingFold
from memlog.reports.summary import summary_of


class RunReader:
    """Reader of a run's journal, in bounded memory."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.series = SeriesFold()
        self.ranking = RankingFold()
        self.totals = Accumulator()
        self._files: dict[str, tuple[JournalFile, Position]] = {}

    def read(self, most: int | None = None, *, complete: bool = False) -> None:
        """Read at most ``most`` events that were not read before; ``None``: all of them.

        ``complete``: True if no process writes to the journal any more.
        """
        for process, entry in islice(self._unread(complete=complete), most):
            self.totals.take(process, entry)
            self.series.take(process, entry.event)
            self.ranking.take(entry.event)

    def _unread(self, *, complete: bool) -> Iterator[tuple[str, Entry]]:
        for found in self.run.files():
            file, at = self._files.setdefault(found.process, (found, START))
            for entry in file.read(at, complete=complete):
                self._files[file.process] = (file, entry.end)
                yield file.process, entry

    def summary(self, end: End | None = None) -> Summary:
        """Read the unread part of the journal, and return the run's summary.

        ``end`` is the run's end, if the journal has none yet.
        """
        # Checked before reading: if the run ends in between, the journal has its end event when it is read.
        alive = self.run.is_alive()
        self.read(complete=not alive)
        files = [file for file, _ in self._files.values()]
        return summary_of(self.run, self.totals, files, alive=alive, end=end)
