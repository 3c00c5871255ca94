"""Read the facts about a run from its journal."""

from __future__ import annotations

from memlog.facts.run_fold import RunFold
from memlog.journal import RunDirectory


def facts_of(run: RunDirectory) -> RunFold:
    """Return the facts about a run, in one pass over its journal."""
    facts = RunFold(judge=run.end() is None)
    for file in run.files():
        for entry in file.read():
            facts.take_entry(entry)
    return facts
