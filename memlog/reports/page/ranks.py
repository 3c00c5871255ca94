"""The runs of the other ranks that trained together with a run."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memlog.events import Parameters
from memlog.journal import RunDirectory, list_runs
from memlog.reports.page.facts import run_series
from memlog.reports.page.series import Chart, Curve
from memlog.reports.schema import Summary
from memlog.reports.summary import summarize

_MOST_RANKS = 64
_POINTS = 500
_BEGUN_WITHIN = 300.0
"""Seconds between the beginnings of ranks of one job, at most."""
_FIRST_EVENTS = 200
"""Events among which a run's parameters are looked for."""


class Rank(msgspec.Struct, frozen=True):
    """One rank's run."""

    rank: int
    summary: Summary
    chart: Chart
    """Its accelerator's memory; without one, its process's."""


def find_ranks(run: RunDirectory, summary: Summary) -> list[Rank]:
    """Return the ranks of a job, in order; empty if the run has no rank, or no other rank's run is here."""
    job = _job(summary.run.parameters)
    if job is None:
        return []
    found = {_rank(summary.run.parameters): run}
    begun = run.begun()
    others = [other for other in list_runs(run.path.parent) if other.id != run.id]
    others = [other for other in others if abs(other.begun() - begun) <= _BEGUN_WITHIN]
    for other in sorted(others, key=lambda other: abs(other.begun() - begun)):
        parameters = _parameters(other)
        if _job(parameters) == job and len(found) < _MOST_RANKS:
            found.setdefault(_rank(parameters), other)
    if len(found) == 1:
        return []
    ranks = (_read(rank, one, summary if one is run else None) for rank, one in found.items())
    return sorted((rank for rank in ranks if rank is not None), key=lambda rank: rank.rank)


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


def _job(parameters: Mapping[str, str]) -> tuple[str, str | None] | None:
    """Return what the ranks of one job have in common; ``None`` for a process that trained alone."""
    size = parameters.get("world_size", "")
    if not size.isdecimal() or int(size) < 2 or not parameters.get("rank", "").isdecimal():  # noqa: PLR2004
        return None
    return size, parameters.get("torchelastic_run_id")


def _rank(parameters: Mapping[str, str]) -> int:
    return int(parameters["rank"])


def _parameters(run: RunDirectory) -> Mapping[str, str]:
    for file in run.files():
        for count, entry in enumerate(file.read()):
            if isinstance(entry.event, Parameters):
                return entry.event.values
            if count >= _FIRST_EVENTS:
                break
    return {}
