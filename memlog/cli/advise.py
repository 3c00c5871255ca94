"""``memlog advise``: changes that would lower the peak of a run's worst step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click
import msgspec
from rich.console import Console

from memlog._internal.terminal import format_bytes
from memlog._internal.text_parser import read_size
from memlog.cli import SETTINGS
from memlog.cli.output import (
    dir_option,
    find_explained_run,
    json_option,
    page,
    plain,
    print_json,
    run_argument,
    table,
)
from memlog.errors import TraceNotFoundError
from memlog.events import Trace
from memlog.facts.later_memory import LongestBatch
from memlog.facts.levels import among
from memlog.journal import RunDirectory
from memlog.ranks.registration import ranks_of
from memlog.reports import encode, summarize
from memlog.reports.advice import RunPlan, plan_for_run
from memlog.reports.worst_step import Standing, advise_on, not_the_largest, read_worst_step
from memlog.settings import runs_directory
from memlog.trace.predict import Advice, Hint
from memlog.trace.records import RecordedTrace

SCHEMA = 1


class RunAdvice(msgspec.Struct, frozen=True):
    """JSON document of the command. docs/advise.md has the docstrings of its fields."""

    schema: int
    """Version of this document."""
    run: str
    """memlog's id of the run."""
    step: int | None
    """The traced step; ``None``: a step that did not complete."""
    advice: Advice
    """What the step held, and what would help."""
    standing: Standing
    """The step beside the run's other steps."""
    longest_batch: LongestBatch | None = None
    """What a batch with the longest sample will need; ``None``: unknown."""
    fit: RunPlan | None = None
    """Answer to ``--fit``; ``None`` without this option."""


@click.command(
    "advise",
    context_settings=SETTINGS,
    short_help="Show what holds a run's memory, and what would reduce it.",
)
@run_argument
@click.option(
    "--fit",
    metavar="SIZE",
    help='Print the cheapest changes with which the step would fit into "24 GiB", and the code for them.',
)
@json_option
@dir_option
def advise_run(run: str, directory: Path | None, *, fit: str | None, as_json: bool) -> None:
    """Show what holds a run's memory, and which changes would reduce it.

    RUN is a run's id or the id's beginning, its name in a tracker, or "latest". The run needs a traced step:
    memlog.init(model=model, layers=True). docs/advise.md explains how the peaks are predicted.

    Exit code 1 if --fit is given, and the step would not fit or another step needs more.
    """
    document = advice_for_run(find_explained_run(runs_directory(directory), run), fit)
    plan = document.fit
    if as_json:
        print_json(encode(document))
    else:
        with page() as console:
            _print(console, document)
        if plan is not None:
            _print_plan(plan)
    if plan is not None and not plan.is_enough:
        click.get_current_context().exit(1)


def advice_for_run(run: RunDirectory, fit: str | None) -> RunAdvice:
    """Return the advice on a run's worst traced step.

    ``fit`` is a size such as ``24 GiB``, for a plan of the changes with which the step would fit; ``None``:
    no plan.

    Raises:
        ConfigurationError: ``fit`` is no size.
        TraceNotFoundError: No step of the run was traced.
    """
    memory = None if fit is None else read_size(fit)
    worst_run, event, trace = _worst_step(run)
    longest = summarize(worst_run).longest_batch
    advice, standing = advise_on(worst_run, event, trace)
    plan = None
    if memory is not None:
        plan = plan_for_run(worst_run, event, trace, memory, standing, longest)
    return RunAdvice(SCHEMA, worst_run.id, event.step, advice, standing, longest, plan)


def _worst_step(run: RunDirectory) -> tuple[RunDirectory, Trace, RecordedTrace]:
    """Return the worst traced step and its run. If another rank failed first, prefer that rank's."""
    failed = run.rank_failure()
    if failed is not None and failed.run is not None and failed.rank is not None:
        other = ranks_of(run).get(failed.rank)
        if other is not None:
            with suppress(TraceNotFoundError):
                return (other, *read_worst_step(other))
    try:
        return (run, *read_worst_step(run))
    except TraceNotFoundError as error:
        waits = summarize(run).traced.untraced
        if waits is None:
            raise
        raise TraceNotFoundError(f"no step of run {run.id} was traced: {waits}") from error


def _print(console: Console, document: RunAdvice) -> None:
    advice = document.advice
    step = "a step that did not end" if document.step is None else f"step {document.step}"
    console.print(
        plain(
            f"run {document.run}, {step}: {'at least ' * advice.is_lower_bound}"
            f"{format_bytes(advice.traced_peak)} at the peak on {advice.device}, "
            f"{among(document.standing.traced_steps)}"
        )
    )
    larger = not_the_largest(document.standing, document.step, advice)
    if larger is not None:
        console.print(plain(larger.replace("`", "")))
    if document.longest_batch is not None:
        console.print(plain(document.longest_batch.text.replace("`", "")))
    _print_holders(console, advice)
    console.print()
    if advice.hints:
        print_hints(console, advice.hints)
    elif advice.peak is not None:
        console.print(plain(_nothing(advice, document.standing.held)))
    for note in advice.notes:
        console.print(plain(note.replace("`", ""), "dim"))


def _print_plan(found: RunPlan) -> None:
    """Print the plan without wrapping, because its code is to be pasted."""
    lines = ["", *found.unsure, found.why_none or ""]
    if found.plan is not None:
        lines[-1] = found.plan.text().replace("`", "")
        if found.plan.code:
            lines += ["", found.plan.code]
    click.echo("\n".join(lines))


def _print_holders(console: Console, advice: Advice) -> None:
    layers = {f"{layer.path} ({layer.largest})": layer.at_peak for layer in advice.layers}
    for heading, held in (("what", advice.categories), ("layer", layers)):
        headings = (heading, f"held at the peak{', at least' * advice.is_lower_bound}", "share")
        rows = table(console, *headings, right=headings[1:], folded=headings)
        for name, size in held.items():
            share = f"{size / advice.traced_peak:.0%}" if advice.traced_peak else ""
            rows.add_row(plain(name), format_bytes(size), share)
        console.print()
        console.print(rows)


def print_hints(console: Console, hints: Sequence[Hint]) -> None:
    """Print a table of changes. Columns: predicted peak, saved bytes, and added time if any was measured."""
    heading, timed = "what would help", any(hint.time is not None for hint in hints)
    figures = ("predicted peak", "saved", *(["added time"] if timed else []))
    rows = table(console, heading, *figures, right=figures, folded=[heading])
    for hint in hints:
        saved = f"{format_bytes(hint.saved)}, {hint.share:.0%}"
        time = [] if not timed else ["" if hint.time is None else f"{hint.time:.0%}"]
        rows.add_row(plain(hint.what.replace("`", "")), format_bytes(hint.peak), saved, *time)
    console.print(rows)


def _nothing(advice: Advice, held: int | None) -> str:
    if held is None or held <= (advice.peak or 0):
        return "Nothing that memlog can predict would make it smaller."
    owner = "the process" if advice.device == "cpu" else advice.device
    return (
        f"No change that memlog can predict would save 1% or more of the {format_bytes(held)} that {owner} "
        "held at that step."
    )
