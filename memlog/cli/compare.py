"""``memlog compare``: a table of several runs, and gates for continuous integration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console

from memlog._internal.terminal import format_bytes
from memlog.cli import SETTINGS
from memlog.cli.completion import complete_runs
from memlog.cli.output import (
    dir_option,
    find_explained_run,
    json_option,
    number,
    page,
    plain,
    print_json,
    table,
)
from memlog.errors import ConfigurationError, GateFailedError
from memlog.reports.compare import (
    ANY_DEVICE,
    Compared,
    Comparison,
    GateResult,
    Unit,
    change_percent,
    compare,
    parse_gate,
    run_figures,
)
from memlog.settings import runs_directory


@click.command(
    "compare", context_settings=SETTINGS, short_help="Show runs side by side: peaks, time, layers."
)
@click.argument(
    "runs", metavar="RUN_A RUN_B …", nargs=-1, required=True, shell_complete=complete_runs
)
@click.option(
    "--fail-if",
    "gates",
    metavar="GATE",
    multiple=True,
    help='Exit with code 1 if this is true of a run, such as "device.peak > +5%". May be repeated.',
)
@click.option(
    "--allow-unfinished",
    is_flag=True,
    help="Also judge runs that failed, were killed or still run, by the data that they have.",
)
@json_option
@dir_option
def compare_runs(
    runs: Sequence[str],
    gates: Sequence[str],
    allow_unfinished: bool,
    directory: Path | None,
    as_json: bool,
) -> None:
    """Show runs side by side: peaks, step time, categories and layers.

    Changes are in per cent of the first run's values. A RUN is a run's id or the id's beginning, its name in
    a tracker, or "latest". docs/compare.md explains gates and the JSON document.
    """
    if len(runs) < 2:  # noqa: PLR2004 - one alone can't be compared
        raise ConfigurationError("name two runs or more: `memlog runs` lists them")
    parsed = [parse_gate(text) for text in gates]
    root = runs_directory(directory)
    found = [find_explained_run(root, name) for name in runs]
    comparison = compare(
        [run_figures(run) for run in found], parsed, allow_unfinished=allow_unfinished
    )
    if as_json:
        print_json(msgspec.json.format(msgspec.json.encode(comparison), indent=2))
    else:
        with page() as console:
            _print(console, comparison)
    failures = [_failed(result) for result in comparison.gates if result.failed is not False]
    if failures:
        raise GateFailedError("; ".join(failures))


def _failed(result: GateResult) -> str:
    if result.failed is None:
        return f"the gate {result.gate!r} can't be judged: {result.why}"
    change = change_percent(result.first, result.value)
    percent = "" if change is None else f" ({change:+.1f} %)"
    values = (_value(result.unit, value) for value in (result.value, result.first))
    return (
        f"the gate {result.gate!r} failed: run {result.run} has {' against '.join(values)}{percent}"
    )


def _print(console: Console, comparison: Comparison) -> None:
    figures = {
        name: compared
        for name, compared in comparison.figures.items()
        if set(compared.values) != {None} and not _is_repeated(name, comparison)
    }
    _print_table(console, "", figures, comparison)
    _print_table(console, "at the traced peak", comparison.categories, comparison)
    _print_table(console, "layer", comparison.layers, comparison)
    if comparison.notes:
        console.print()
    for note in comparison.notes:
        console.print(plain(note, "dim"))


def _is_repeated(name: str, comparison: Comparison) -> bool:
    """Return True if a row such as ``cuda0.peak`` repeats ``device.peak``, the maximum of all devices."""
    owner, _, measure = name.partition(".")
    if owner == ANY_DEVICE:
        return False
    any_of_them = comparison.figures.get(f"{ANY_DEVICE}.{measure}")
    return any_of_them is not None and any_of_them.values == comparison.figures[name].values


def _print_table(
    console: Console, heading: str, rows: Mapping[str, Compared], comparison: Comparison
) -> None:
    if not rows and heading:
        return
    grid = table(console)
    grid.add_column(heading, overflow="fold")
    for at, run in enumerate(comparison.runs):
        grid.add_column(plain(f"{run.id} {run.name}" if run.name else run.id), justify="right")
        if at:
            grid.add_column("change", justify="right", no_wrap=True)
    if not heading:
        first, *others = (run.status for run in comparison.runs)
        grid.add_row("status", first, *(cell for status in others for cell in (status, "")))
    for name, compared in rows.items():
        cells = [_value(compared.unit, compared.values[0])]
        for value, change in zip(compared.values[1:], compared.changes_percent[1:], strict=True):
            cells += [_value(compared.unit, value), "" if change is None else f"{change:+.1f} %"]
        grid.add_row(plain(name), *cells)
    if heading:
        console.print()
    console.print(grid)


def _value(unit: Unit, value: float | None) -> str:
    if value is None:
        return "unknown"
    if unit == "bytes":
        return format_bytes(value)
    return f"{number(value)} ms" if unit == "ms" else number(value)
