"""Search for the run that a user names. For ``latest`` it is the lowest rank's, which the tracker has."""

from __future__ import annotations

from pathlib import Path

from memlog import journal
from memlog.journal import RunDirectory
from memlog.journal.runs import LATEST
from memlog.ranks.registration import ranks_of


def find_run(root: Path, name: str) -> RunDirectory:
    """Do the same as `memlog.journal.find_run`, but ``latest`` is the lowest rank's run.

    Raises:
        RunNotFoundError: No run matches.
        AmbiguousRunError: More than one matches.
    """
    found = journal.find_run(root, name)
    return lowest_rank(found) if name == LATEST else found


def lowest_rank(run: RunDirectory) -> RunDirectory:
    """Return the run of the lowest rank of a run's training; the run itself if it trains alone."""
    return next(iter(ranks_of(run).values()), run)
