"""``memlog advise``: what would make a run's worst step smaller."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console

from memlog._internal.units import format_bytes
from memlog.cli.options import SETTINGS, dir_option, json_option, run_argument
from memlog.cli.output import page, plain, print_json, table
from memlog.journal import find_run
from memlog.reports.step_ranking import Standing, advise_on, not_the_largest
from memlog.reports.traced_steps import among
from memlog.reports.worst_step import read_worst_step
from memlog.settings import runs_directory
from memlog.trace.predict import Advice

SCHEMA = 1


class RunAdvice(msgspec.Struct, frozen=True):
    """The JSON document: docs/advise.md tells of every field."""

    schema: int
    run: str
    step: int | None
    advice: Advice
    standing: Standing


@click.command("advise", context_settings=SETTINGS)
@run_argument
@json_option
@dir_option
def advise_run(run: str, directory: Path | None, as_json: bool) -> None:
    """Says what holds a run's memory, and what would make it less.

    RUN is a run's id, the unique beginning of one, or "latest". It needs a traced step:
    memlog.init(model=model, layers=True). docs/advise.md says how the peaks are predicted.
    """
    found = find_run(runs_directory(directory), run)
    event, trace = read_worst_step(found)
    told = RunAdvice(SCHEMA, found.id, event.step, *advise_on(found, event, trace))
    if as_json:
        print_json(msgspec.json.format(msgspec.json.encode(told, order="sorted"), indent=2))
        return
    with page() as console:
        _print(console, told)


def _print(console: Console, told: RunAdvice) -> None:
    advice = told.advice
    step = "a step that was not over" if told.step is None else f"step {told.step}"
    console.print(
        plain(
            f"run {told.run}, {step}: {format_bytes(advice.traced_peak)} at the peak on {advice.device}, "
            f"{among(told.standing.traced_steps)}"
        )
    )
    larger = not_the_largest(told.standing, told.step, advice)
    if larger is not None:
        console.print(plain(larger.replace("`", "")))
    _print_holders(console, advice)
    _print_hints(console, told)
    for note in advice.notes:
        console.print(plain(note, "dim"))


def _print_holders(console: Console, advice: Advice) -> None:
    layers = {f"{layer.path} ({layer.largest})": layer.at_peak for layer in advice.layers}
    for heading, held in (("what", advice.categories), ("layer", layers)):
        rows = table(console)
        rows.add_column(heading, overflow="fold")
        rows.add_column("held at the peak", justify="right")
        rows.add_column("share", justify="right")
        for name, size in held.items():
            share = f"{size / advice.traced_peak:.0%}" if advice.traced_peak else ""
            rows.add_row(plain(name), format_bytes(size), share)
        console.print()
        console.print(rows)


def _print_hints(console: Console, told: RunAdvice) -> None:
    console.print()
    advice, held = told.advice, told.standing.held
    if not advice.hints:
        console.print(plain(_nothing(advice, held)))
        return
    rows = table(console)
    rows.add_column("what would help", overflow="fold")
    rows.add_column("predicted peak", justify="right", no_wrap=True)
    rows.add_column("saved", justify="right", no_wrap=True)
    for hint in advice.hints:
        saved = f"{format_bytes(hint.saved)}, {hint.share:.0%}"
        rows.add_row(plain(hint.what.replace("`", "")), format_bytes(hint.peak), saved)
    console.print(rows)


def _nothing(advice: Advice, held: int | None) -> str:
    if held is None or held <= (advice.peak or 0):
        return "Nothing that memlog can predict would make it smaller."
    who = "the process" if advice.device == "cpu" else advice.device
    return (
        f"Nothing that memlog can predict would save a hundredth of the {format_bytes(held)} that {who} held "
        "at that step."
    )
