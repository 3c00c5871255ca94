"""Sentences of a post-mortem about the ranks: which rank this run is, and how the other ranks ended."""

from __future__ import annotations

from collections.abc import Iterator

from memlog.ranks.ends import FROM_OUTSIDE, RankEnd, how_it_ended
from memlog.reports.final_state import FinalState


def title_of_rank(state: FinalState, title: str) -> str:
    """Return a title that names this rank. If another rank ended first, the title names that rank, too."""
    position = state.position
    if position is None:
        return title
    first = _ended_before(state)
    if first is not None:
        return f"Rank {position.rank} of {position.world_size} was ended after {first.sentence}"
    return f"Rank {position.rank} of {position.world_size}: {title[0].lower()}{title[1:]}"


def sentences_of_rank(state: FinalState) -> Iterator[str]:
    """Yield sentences on the end of this process and of the other ranks."""
    position, end = state.position, state.exit
    if position is None:
        return
    first, failure = _ended_before(state), state.failed_with
    if end is not None and (end.signal or end.code is not None):
        yield f"The process {how_it_ended(end)}."
    if failure is not None:
        yield f"Of {position.world_size} ranks, {failure.title}: {failure.text}."
    if first is not None:
        yield f"Look for the cause in rank {first.rank}, which ended first."
    elif failure is None and position.rank and end is not None and end.signal in FROM_OUTSIDE:
        yield (
            f"A launcher sends {end.signal} to all other ranks when one has ended. The run of rank 0 has an "
            "alert that names the rank that ended first."
        )


def _ended_before(state: FinalState) -> RankEnd | None:
    if state.position is None or state.failed_with is None:
        return None
    first = state.failed_with.first
    return None if first is None or first.rank == state.position.rank else first
