"""``memlog show``: summary of one run: the verdict, its cause, and the peaks, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from memlog._internal.terminal import format_duration
from memlog.cli import SETTINGS
from memlog.cli.output import (
    dir_option,
    find_explained_run,
    json_option,
    page,
    plain,
    print_json,
    run_argument,
)
from memlog.cli.summary_page import (
    all_peaks,
    head,
    headline,
    health_facts,
    indented,
    peaks,
    print_everything,
    section,
    table_of,
    tracing_ms,
    trackers,
    worst_traced,
)
from memlog.errors import ConfigurationError
from memlog.events import ALLOCATED, HOST_RSS, RESERVED
from memlog.facts.levels import Peak
from memlog.findings import beyond, evidence_and_remedy
from memlog.journal import RunDirectory
from memlog.reports import encode, summarize
from memlog.reports.brief import brief
from memlog.reports.final_state import like_another, role, shapes
from memlog.reports.postmortem import survived
from memlog.reports.schema import Summary
from memlog.settings import runs_directory

_MOST_LINES = 25
_SIZES = ((6, 3), (5, 2), (4, 1), (3, 1), (2, 0))
"""Maximum numbers of peaks, and of lines of evidence. The first pair with which the page has at most
`_MOST_LINES` lines is taken, and the last pair if there is none."""
_FINDINGS_SHOWN = 2
"""Maximum number of further findings."""


def print_short(console: Console, summary: Summary) -> None:
    """Print a run's verdict, its cause, and its peaks."""
    page = Group()
    for shown_peaks, evidence in _SIZES:
        page = Group(*_parts(console, summary, shown_peaks, evidence))
        if len(console.render_lines(page, pad=False)) <= _MOST_LINES:
            break
    console.print(page)


def _parts(
    console: Console, summary: Summary, shown_peaks: int, evidence: int
) -> Iterator[RenderableType]:
    yield headline(summary)
    yield from _cause(summary, evidence)
    yield ""
    yield head(summary, short=True)
    yield section("Peaks", peaks(console, summary, _main_peaks(summary, shown_peaks)))
    if summary.health.delivered:
        yield section("Delivery", table_of(trackers(console, summary, short=True)))
    yield ""
    yield table_of({**_short_facts(summary), **_trouble(summary)})
    show = RunDirectory(Path(summary.run.directory)).command("show")
    yield plain(f"`{show} --all` shows metrics, alerts, files and memlog's health.", "dim")


def _cause(summary: Summary, evidence: int) -> Iterator[RenderableType]:
    """Yield the main finding's evidence and remedy, and the sentences of further findings."""
    for finding in summary.findings[:1]:
        lines = evidence_and_remedy(finding)
        known = len(finding.evidence)
        for line in lines[:known][:evidence] + lines[known:]:
            yield indented(plain(line))
    further = summary.findings[1:]
    for finding in further[:_FINDINGS_SHOWN]:
        yield plain(f"also: {finding.title}")
    if len(further) > _FINDINGS_SHOWN:
        yield plain(f"and {len(further) - _FINDINGS_SHOWN:,} more findings")


def _main_peaks(summary: Summary, most: int) -> list[tuple[str, Peak]]:
    """Return the most important peaks: the process's, then those of the devices, the largest first."""
    known = all_peaks(summary)
    chosen = sorted(known, key=_importance)[:most]
    return [peak for peak in known if peak in chosen]


def _importance(each: tuple[str, Peak]) -> tuple[int, int]:
    kind, peak = each
    endings = (kind == HOST_RSS, kind.endswith(ALLOCATED), not kind.endswith(RESERVED), True)
    return endings.index(True), -(peak.bytes or 0)


def _short_facts(summary: Summary) -> dict[str, str | Text]:
    facts: dict[str, str | Text] = {}
    if summary.survived_failures:
        facts["failures"] = survived(summary)
    if summary.traced.steps:
        facts["traced"] = worst_traced(summary.traced)
    elif summary.traced.untraced:
        facts["traced"] = plain(f"no step: {summary.traced.untraced}")
    if summary.largest_step is not None:
        largest = summary.largest_step
        but = "" if largest.like_step is None else f". {like_another(largest.like_step)}"
        made = role(largest, summary.peaks)
        facts["inputs"] = f"step {largest.step:,} {made}: {shapes(largest.inputs)}{but}"
    if summary.longest_batch is not None and not _is_told(summary):
        facts["longest"] = summary.longest_batch.text
    failed = summary.failed_rank
    if failed is not None:
        others = failed.others
        if failed.run is not None:
            other = RunDirectory(Path(summary.run.directory).parent / failed.run)
            others += f"; `{other.command('show')}` shows rank {failed.rank}"
        facts["ranks"] = others
    alerts = beyond(summary.verdict, summary.alerts)
    if alerts:
        more = f", and {len(alerts) - 1:,} more" if len(alerts) > 1 else ""
        facts["alerts"] = f"{alerts[-1].title}{more}"
    return facts


def _is_told(summary: Summary) -> bool:
    """Return True if the first finding says what the longest batch needs."""
    return any(
        finding.kind in ("longest_batch", "larger_steps") for finding in summary.findings[:1]
    )


def _trouble(summary: Summary) -> dict[str, str | Text]:
    """Return memlog's own cost, and the parts of its health that a reader has to know."""
    health, tracing = health_facts(summary), tracing_ms(summary.traced)
    if tracing:
        took = format_duration(tracing / 1e3)
        health["overhead"] = f"{summary.health.overhead_text}, and {took} for traced steps"
    if not (summary.health.dropped or summary.health.faults):
        health["overhead"] = f"{health['overhead']}; nothing was lost"
    wanted = {"dropped": summary.health.dropped, "faults": summary.health.faults}
    named = [name for name, counts in wanted.items() if counts]
    named += [name for name in ("journal", "never judged") if name in health]
    return {name: health[name] for name in ("overhead", *named)}


@click.command(context_settings=SETTINGS)
@run_argument
@click.option("--all", "everything", is_flag=True, help="Show all metrics, alerts and files, too.")
@click.option(
    "--brief",
    "briefly",
    is_flag=True,
    help="Show verdict, cause, place, remedy and next step, in at most 300 tokens of a language model.",
)
@json_option
@dir_option
def show(
    run: str, directory: Path | None, *, everything: bool, briefly: bool, as_json: bool
) -> None:
    """Show one run: its memory, and the delivery of its points.

    RUN is a run's id or the id's beginning, its name in a tracker, or "latest". docs/show-json.md explains
    every field of the JSON document.
    """
    if briefly and (everything or as_json):
        raise ConfigurationError(
            "--brief shows a part of what --all and --json show: pass one of them"
        )
    named_run = find_explained_run(runs_directory(directory), run)
    summary = summarize(named_run, remember=True)
    if briefly:
        click.echo("\n".join(brief(named_run, summary)))
        return
    if as_json:
        print_json(encode(summary))
        return
    with page() as console:
        (print_everything if everything else print_short)(console, summary)
