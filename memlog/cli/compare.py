"""``memlog compare``: a table of several runs, and gates for continuous integration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console

from memlog.cli import SETTINGS
from memlog.cli.completion import complete_files_and_runs
from memlog.cli.output import (
    dir_option,
    find_explained_run,
    json_option,
    notice,
    page,
    plain,
    print_json,
    table,
)
from memlog.errors import ConfigurationError, GateFailedError, JournalError
from memlog.reports.baseline import (
    UNNAMED_TRAINING,
    baseline_of,
    find_baseline,
    read_baselines,
    update_baselines,
)
from memlog.reports.compare import Compared, Comparison, compare
from memlog.reports.figures import ANY_DEVICE, RunFigures, repeated, run_figures, value_text
from memlog.reports.gates import Gate, parse_gate
from memlog.settings import runs_directory

FORMATS = ("text", "json", "markdown", "github", "sarif", "junit")


@click.command(
    "compare", context_settings=SETTINGS, short_help="Show runs side by side: peaks, time, layers."
)
@click.argument(
    "runs",
    metavar="[BASELINE.json] RUN_A RUN_B …",
    nargs=-1,
    required=True,
    shell_complete=complete_files_and_runs,
)
@click.option(
    "--fail-if",
    "gates",
    metavar="GATE",
    multiple=True,
    help='Exit with code 1 if this is true of a run, such as "device.peak > +5%" or "trace.peak > 600 MiB". '
    "May be repeated.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Write the runs' figures into BASELINE.json instead of judging them.",
)
@click.option(
    "--allow-unfinished",
    is_flag=True,
    help="Also judge runs that failed, were killed or still run, by the data that they have.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(FORMATS),
    default="text",
    help="Format of the output: github prints annotations, sarif and junit the results of the gates.",
)
@json_option
@dir_option
def compare_runs(
    runs: Sequence[str],
    gates: Sequence[str],
    update: bool,
    allow_unfinished: bool,
    layout: str,
    as_json: bool,
    directory: Path | None,
) -> None:
    """Show runs side by side: peaks, step time, categories and layers.

    Changes are in per cent of the first run's values. A RUN is a run's id or the id's beginning, its name in
    a tracker, its folder, or "latest". A BASELINE.json is a file that --update has written; the runs after it
    are repeats of one training. docs/compare.md explains gates, baseline files and the formats.
    """
    baseline = Path(runs[0]) if runs[0].endswith(".json") else None
    names = runs[1:] if baseline else runs
    parsed = [parse_gate(text) for text in gates]
    _require_runs(names, baseline, parsed, update=update)
    found = [find_explained_run(runs_directory(directory), name) for name in names]
    figures = [run_figures(run) for run in found]
    if baseline is not None:
        figures = _with_baseline(
            baseline, figures, update=update, allow_unfinished=allow_unfinished
        )
    comparison = compare(figures, parsed, allow_unfinished=allow_unfinished)
    _show(comparison, "json" if as_json else layout, baseline)
    failures = [result.text for result in comparison.gates if result.failed is not False]
    if failures:
        raise GateFailedError("; ".join(failures))


def _require_runs(
    names: Sequence[str], baseline: Path | None, gates: Sequence[Gate], *, update: bool
) -> None:
    if any(name.endswith(".json") for name in names):
        raise ConfigurationError("name the baseline file first, and only one")
    if update and baseline is None:
        raise ConfigurationError(
            "--update writes a baseline file: name it first, as in `memlog compare memory.json latest "
            "--update`"
        )
    if update and gates:
        raise ConfigurationError(
            "--update accepts the runs' figures, and --fail-if judges them: pass only one of them"
        )
    if baseline is not None and not names:
        raise ConfigurationError(f"name a run to compare with {baseline}: `memlog runs` lists them")
    if baseline is not None or len(names) > 1:
        return
    changes = [gate for gate in gates if gate.is_change]
    if changes:
        raise ConfigurationError(
            f"the gate {changes[0].text!r} is about a change: name two runs, or write a limit such as "
            '"trace.peak > 600 MiB"'
        )
    if not gates:  # one alone can't be compared
        raise ConfigurationError("name two runs or more: `memlog runs` lists them")


def _with_baseline(
    file: Path, runs: Sequence[RunFigures], *, update: bool, allow_unfinished: bool
) -> list[RunFigures]:
    """Return the entry of the baseline file and the runs' figures as those of one training.

    With ``update``, write the figures into the file first. The entry is then the one before.
    """
    names = sorted({run.name or UNNAMED_TRAINING for run in runs})
    if len(names) > 1:
        raise ConfigurationError(
            f"runs after a baseline file are repeats of one training, and these have different names "
            f"({', '.join(names)}): compare them one after the other"
        )
    together = repeated(runs)
    if not update:
        return [find_baseline(file, read_baselines(file), names[0]), together]
    if together.status != "finished" and not allow_unfinished:
        raise JournalError(
            f"run {together.id} is not finished ({together.status}), so {file} was not changed; "
            "--allow-unfinished writes the figures that the run has"
        )
    new = baseline_of(together)
    if not new.figures:
        raise JournalError(
            f"run {together.id} has no figure that is the same in each run, so {file} was not changed: "
            "record it with layers=True, or name three runs or more of the training"
        )
    before = update_baselines(file, {names[0]: new}).get(names[0])
    notice(f"wrote the figures of {names[0]!r} into {file}")
    return [together] if before is None else [before.as_run(file, names[0]), together]


def _show(comparison: Comparison, layout: str, baseline: Path | None) -> None:
    if layout == "json":
        print_json(msgspec.json.format(msgspec.json.encode(comparison), indent=2))
    elif layout == "text":
        with page() as console:
            _print(console, comparison)
    else:
        from memlog.cli.compare_formats import formatted  # noqa: PLC0415 - for other programs only

        click.echo(formatted(comparison, layout, baseline))


def _print(console: Console, comparison: Comparison) -> None:
    _print_table(console, "", shown_figures(comparison), comparison)
    _print_table(console, "at the traced peak", comparison.categories, comparison)
    _print_table(console, "layer", comparison.layers, comparison)
    if comparison.notes:
        console.print()
    for note in comparison.notes:
        console.print(plain(note, "dim"))


def shown_figures(comparison: Comparison) -> dict[str, Compared]:
    """Return the figures that a run has, without those that repeat the figure of all devices."""
    return {
        name: compared
        for name, compared in comparison.figures.items()
        if set(compared.values) != {None} and not _is_repeated(name, comparison)
    }


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
        cells = [value_text(compared.unit, compared.values[0])]
        for value, change in zip(compared.values[1:], compared.changes_percent[1:], strict=True):
            shown = "" if change is None else f"{change:+.1f} %"
            cells += [value_text(compared.unit, value), shown]
        grid.add_row(plain(name), *cells)
    if heading:
        console.print()
    console.print(grid)
