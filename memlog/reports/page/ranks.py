"""The runs of the other ranks that trained together with a run."""

from __future__ import annotations

from itertools import islice

import msgspec

from memlog.journal import RunDirectory
from memlog.ranks.registration import ranks_of
from memlog.reports.page.facts import run_series
from memlog.reports.page.series import Chart, Curve
from memlog.reports.schema import Summary
from memlog.reports.summary import summarize

_MAX_RANKS = 64
_POINTS = 500


class Rank(msgspec.Struct, frozen=True):
    """One rank's run."""

    rank: int
    summary: Summary
    chart: Chart
    """Its accelerator's memory; without one, its process's."""


def find_ranks(run: RunDirectory, summary: Summary) -> list[Rank]:
    """Return the ranks of a training, in order; empty if no other rank's run is in the folder."""
    found = ranks_of(run)
    if len(found) < 2:  # noqa: PLR2004 - one run is no comparison
        return []
    first = dict(islice(found.items(), _MAX_RANKS))
    ranks = (_read(rank, one, summary if one.id == run.id else None) for rank, one in first.items())
    return [rank for rank in ranks if rank is not None]


def rank_chart(ranks: list[Rank]) -> Chart | None:
    """Return one chart with a line for each rank; ``None`` if their memory is not of one kind."""
    widest = max(rank.chart.width for rank in ranks)
    lines = {rank.rank: _widened(rank.chart, widest) for rank in ranks}
    x = sorted({at for line in lines.values() for at in line})
    return Chart(
        id="ranks",
        title=f"All ranks, {ranks[0].chart.main.label}",
        x=x,
        width=widest,
        curves=[
            Curve(f"rank {rank}", "level", None, [line.get(at) for at in x])
            for rank, line in lines.items()
        ],
        limit=next((rank.chart.limit for rank in ranks if rank.chart.limit is not None), None),
    )


def _widened(chart: Chart, width: int) -> dict[int, int]:
    line: dict[int, int] = {}
    for at, value in zip(chart.x, chart.main.high, strict=True):
        if value is not None:
            wide = at // width * width
            line[wide] = max(value, line.get(wide, value))
    return line


def _read(rank: int, run: RunDirectory, known: Summary | None) -> Rank | None:
    charts = run_series(run, points=_POINTS).charts
    if not charts:
        return None
    return Rank(rank, known or summarize(run), charts[0])
