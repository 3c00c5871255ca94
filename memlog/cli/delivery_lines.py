"""Delivery of a run's points, on the page of ``memlog show``: one entry for each tracker."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from memlog.cli.addresses import place_of
from memlog.cli.output import plain, sign
from memlog.journal import RunDirectory
from memlog.ranks.registration import lowest_rank
from memlog.reports.schema import Delivery, Summary

_STAGES = {"done": "green", "unreachable": "red"}
_RUNS_SHOWN = 5


def deliveries(console: Console, summary: Summary) -> Text | dict[str, str | Text]:
    """Return one entry for each tracker; if there is none, a sentence that says so."""
    delivered = summary.health.delivered
    run = RunDirectory(Path(summary.run.directory))
    sync = run.command("sync")
    if not delivered:
        first = lowest_rank(run)
        if first.id != run.id and first.files("ranks"):
            return plain(
                f"with run {first.id}, which has the smallest, mean and largest memory of all ranks; "
                f"`{sync} --to mlflow` delivers this rank's own"
            )
        return plain(f"to no tracker; `{sync} --to mlflow` delivers it to one")
    return trackers(console, summary)


def trackers(console: Console, summary: Summary, *, short: bool = False) -> dict[str, str | Text]:
    """Return one entry for each tracker, and how to deliver what it lacks."""
    delivered = summary.health.delivered
    sync = RunDirectory(Path(summary.run.directory)).command("sync")
    runs = 1 if short else _RUNS_SHOWN
    facts: dict[str, str | Text] = {
        name: _delivery(console, name, delivery, runs) for name, delivery in delivered.items()
    }
    unfinished = any(delivery.stage != "done" for delivery in delivered.values())
    if unfinished and summary.status != "running":
        facts[""] = f"`{sync}` delivers the rest"
    return facts


def _delivery(console: Console, name: str, delivery: Delivery, shown: int) -> Text:
    text = Text(f"{delivery.points:,} points")
    if delivery.stage != "done":
        text = text.append(" delivered") if delivery.points else Text("nothing delivered")
        text.append(", ").append(delivery.stage, _STAGES.get(delivery.stage, ""))
    elif not delivery.problem:
        text.append(" ").append(sign(console, "✓", "done"), _STAGES["done"])
    if delivery.problem:
        text.append(": ").append(plain(delivery.problem))
    for run in delivery.runs[:shown]:
        kind = "own run" if run.own else "run"
        title = f" {run.name!r}" if run.name else ""
        text.append(f"\n{kind} ").append(plain(f"{run.id}{title}{place_of(name, run.uri)}"))
        if run.offset > 0:
            text.append(f"; its step 0 is step {run.offset:,} here")
        elif run.offset < 0:
            text.append(f"; step 0 here is its step {-run.offset:,}")
    if len(delivery.runs) > shown:
        more = len(delivery.runs) - shown
        text.append("\nand 1 more run" if more == 1 else f"\nand {more:,} more runs")
    return text
