"""Runs of the ranks that trained together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice, zip_longest

import msgspec

from memlog.events import Ranks
from memlog.journal import RunDirectory
from memlog.ranks.registration import ranks_of
from memlog.reports.page.facts import run_series
from memlog.reports.page.series import Chart, side_by_side
from memlog.reports.schema import Summary
from memlog.reports.summary import summarize

_MAX_RANKS = 64
"""Maximum number of ranks that a report shows. Ranks with the most or the least memory have precedence."""
_POINTS = 500


class Rank(msgspec.Struct, frozen=True):
    rank: int
    summary: Summary
    chart: Chart
    """Memory of the rank's accelerator, or of its process if the rank has no accelerator."""


def find_ranks(run: RunDirectory, summary: Summary) -> tuple[list[Rank], int]:
    """Return the ranks that a report shows, in order, and the number of all ranks that have a run.

    The list is empty if no other rank's run is in the folder.
    """
    found = ranks_of(run)
    if len(found) < 2:  # noqa: PLR2004 - one run is no comparison
        return [], len(found)
    shown = sorted(found if len(found) <= _MAX_RANKS else _shown(found))
    ranks = (
        _read(rank, found[rank], summary if found[rank].id == run.id else None) for rank in shown
    )
    return [rank for rank in ranks if rank is not None], len(found)


def _shown(found: Mapping[int, RunDirectory]) -> list[int]:
    """Return at most `_MAX_RANKS` ranks: those with the most or the least memory, then the lowest numbers."""
    most: dict[int, int] = {}
    least: dict[int, int] = {}
    for event in _events(found):
        by_name = {spread.name: spread for spread in event.spreads}
        spread = by_name.get("device/peak") or by_name.get("host/rss")
        if spread is not None:
            largest, smallest = spread.largest_rank, spread.smallest_rank
            most[largest] = max(spread.largest, most.get(largest, 0))
            least[smallest] = min(spread.smallest, least.get(smallest, spread.smallest))
    pairs = zip_longest(
        sorted(most, key=lambda rank: -most[rank]), sorted(least, key=lambda rank: least[rank])
    )
    wanted = (rank for rank in chain(*pairs, found) if rank in found)
    return list(islice(dict.fromkeys(wanted), _MAX_RANKS))


def _events(found: Mapping[int, RunDirectory]) -> Iterator[Ranks]:
    for run in found.values():
        yield from (event for event in run.events("ranks") if isinstance(event, Ranks))


def rank_chart(ranks: list[Rank]) -> Chart:
    by_rank = {f"rank {rank.rank}": rank.chart for rank in ranks}
    limit = next((rank.chart.limit for rank in ranks if rank.chart.limit is not None), None)
    return side_by_side("ranks", f"All ranks, {ranks[0].chart.main.label}", by_rank, limit)


def _read(rank: int, run: RunDirectory, known: Summary | None) -> Rank | None:
    charts = run_series(run, points=_POINTS).charts
    if not charts:
        return None
    return Rank(rank, known or summarize(run), charts[0])
