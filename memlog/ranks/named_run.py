"""Search for the run that a user names.

``latest`` means the run of the lowest rank in the newest training. memlog sends this run to the trackers.
"""

from __future__ import annotations

from pathlib import Path

from memlog import journal
from memlog.journal import RunDirectory
from memlog.journal.runs import LATEST
from memlog.ranks.registration import ranks_of


def find_named_run(root: Path, name: str) -> RunDirectory:
    """Return the run that a user names, as `memlog.journal.find_run` does.

    For ``latest``, find the training of the newest run. Return the run of this training's lowest rank.

    Raises:
        RunNotFoundError: No run matches.
        AmbiguousRunError: More than one run matches.
    """
    found = journal.find_run(root, name)
    return lowest_rank(found) if name == LATEST else found


def lowest_rank(run: RunDirectory) -> RunDirectory:
    """Return the run of the lowest rank in a run's training; the run itself if it is not registered."""
    return next(iter(ranks_of(run).values()), run)
