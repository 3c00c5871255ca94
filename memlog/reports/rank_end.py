"""Sentences of a post-mortem about the ranks: which rank this run is, and how the other ranks ended."""

from __future__ import annotations

from collections.abc import Iterator

from memlog.findings import how_it_ended, of_rank
from memlog.ranks.ends import FROM_OUTSIDE
from memlog.reports.final_state import FinalState

_UNEXPECTED = "Ended unexpectedly"


def title_of_rank(state: FinalState, title: str) -> str:
    """Return a title that names this rank, and how its process ended if that is known.

    If no rank is the cause of the training's end, the title is about all ranks.
    """
    position, end = state.position, state.exit
    if position is None:
        return title
    if state.failed_with is not None and state.failed_with.first is None:
        return state.failed_with.title
    named = of_rank(position.rank, title)
    if title.startswith(_UNEXPECTED) and end is not None and (end.signal or end.code is not None):
        how = how_it_ended(end.signal, end.code)
        return f"Rank {position.rank} {how}{title.removeprefix(_UNEXPECTED)}"
    return named


def sentences_of_rank(state: FinalState) -> Iterator[str]:
    """Yield sentences on the end of this process and of the other ranks."""
    position, end, failure = state.position, state.exit, state.failed_with
    if position is None:
        return
    if end is not None and (end.signal or end.code is not None):
        yield f"The process {how_it_ended(end.signal, end.code)}."
    if failure is not None:
        yield f"{position.world_size} ranks trained together: {failure.text}."
    elif position.rank and end is not None and end.signal in FROM_OUTSIDE:
        yield (
            f"A launcher sends {end.signal} to all other ranks when one has ended. The run of rank 0 names "
            "the rank that failed first."
        )
