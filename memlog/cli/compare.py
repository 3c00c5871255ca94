"""``memlog compare``: a table of several runs, and gates for continuous integration, in several formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import click
import msgspec
from rich.console import Console

from memlog._internal.terminal import format_bytes, one_line
from memlog._version import __version__
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
from memlog.reports.compare import Compared, Comparison, compare
from memlog.reports.figures import ANY_DEVICE, RunFigures, Unit, repeated, run_figures, value_text
from memlog.reports.gates import (
    UNNAMED_TRAINING,
    Gate,
    GateResult,
    baseline_of,
    find_baseline,
    parse_gate,
    read_baselines,
    update_baselines,
)
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
    named_runs = [find_explained_run(runs_directory(directory), name) for name in names]
    figures = [run_figures(run) for run in named_runs]
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


_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def formatted(comparison: Comparison, layout: str, baseline: Path | None) -> str:
    """Return a comparison as ``markdown``, ``github``, ``sarif`` or ``junit``.

    ``baseline`` is the baseline file of the comparison, if it has one: the place that SARIF shows.
    """
    if layout == "markdown":
        return "\n".join(_markdown(comparison))
    if layout == "github":
        return "\n".join(_annotations(comparison))
    return _sarif(comparison, baseline) if layout == "sarif" else _junit(comparison)


def _markdown(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of a comment: the gates, all figures, and the categories and layers that changed."""
    if comparison.gates:
        counts = {
            "failed": sum(result.failed is True for result in comparison.gates),
            "could not be judged": sum(result.failed is None for result in comparison.gates),
            "passed": sum(result.failed is False for result in comparison.gates),
        }
        yield f"**Gates: {', '.join(f'{count} {outcome}' for outcome, count in counts.items() if count)}**"
        yield ""
        for result in comparison.gates:
            mark = "\N{WHITE HEAVY CHECK MARK}" if result.failed is False else "\N{CROSS MARK}"
            yield f"- {mark} {_escaped(result.text)}"
        yield ""
    yield from _table("figure", shown_figures(comparison), comparison)
    for heading, rows in (
        ("at the traced peak", comparison.categories),
        ("layer", comparison.layers),
    ):
        changed = {name: row for name, row in rows.items() if len({*row.values}) > 1}
        if changed:
            yield ""
            yield from _table(heading, changed, comparison)
    if len(comparison.runs) > 1 and comparison.categories:
        unchanged = [
            name
            for name, rows in (("category", comparison.categories), ("layer", comparison.layers))
            if rows and all(len({*row.values}) == 1 for row in rows.values())
        ]
        if unchanged:
            yield ""
            yield f"No {' and no '.join(unchanged)} changed."
    for note in comparison.notes:
        yield ""
        yield _escaped(note)


def _table(heading: str, rows: Mapping[str, Compared], comparison: Comparison) -> Iterator[str]:
    first, *others = (
        _escaped(f"{run.id} {run.name}" if run.name else run.id) for run in comparison.runs
    )
    cells = [heading, first, *(cell for name in others for cell in (name, "change"))]
    yield _row(cells)
    yield _row(["---", *["--:"] * (len(cells) - 1)])
    for name, row in rows.items():
        base = row.values[0]
        shown = [value_text(row.unit, base)]
        for value, percent in zip(row.values[1:], row.changes_percent[1:], strict=True):
            shown += [value_text(row.unit, value), _change(row.unit, base, value, percent)]
        yield _row([_escaped(name), *shown])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _change(unit: Unit, first: float | None, value: float | None, percent: float | None) -> str:
    if first is None or value is None:
        return ""
    if value == first:
        return "0"
    sign = "+" if value > first else "-"
    size = format_bytes(abs(value - first)) if unit == "bytes" else ""
    parts = [f"{sign}{size}" if size else "", "" if percent is None else f"{percent:+.1f} %"]
    return f"{parts[0]} ({parts[1]})" if all(parts) else "".join(parts)


def _escaped(text: str) -> str:
    """Return text as Markdown that shows it literally. Names are from journals, which others may write."""
    # The backslash comes first, because the escapes of the other characters begin with one.
    for char in "\\`*_|[]~#":
        text = text.replace(char, f"\\{char}")
    for char, safe in (("&", "&amp;"), ("<", "&lt;"), ("@", "&#64;")):  # also mentions no person
        text = text.replace(char, safe)
    return one_line(text)


def _annotations(comparison: Comparison) -> Iterator[str]:
    """Yield GitHub's workflow commands: an error for each gate that failed or could not be judged."""
    for result in comparison.gates:
        kind = "notice" if result.failed is False else "error"
        title = _command(f"memlog {result.figure}").replace(":", "%3A").replace(",", "%2C")
        yield f"::{kind} title={title}::{_command(result.text)}"


def _command(text: str) -> str:
    """Return text with the escapes of GitHub's workflow commands."""
    return one_line(text).replace("%", "%25")


def _sarif(comparison: Comparison, baseline: Path | None) -> str:
    """Return SARIF 2.1.0 with a result for each gate that failed or could not be judged."""
    results = [result for result in comparison.gates if result.failed is not False]
    figures = sorted({result.figure for result in results})
    name = comparison.runs[0].name or ""
    rules = [
        {"id": figure, "shortDescription": {"text": f"Limit of the figure {figure}"}}
        for figure in figures
    ]
    run = {
        "tool": {
            "driver": {
                "name": "memlog",
                "version": __version__,
                "rules": rules,
            }
        },
        "results": [
            {
                "ruleId": result.figure,
                "level": "error",
                "message": {"text": one_line(result.text)},
                "locations": [] if baseline is None else [_place(baseline, name)],
            }
            for result in results
        ],
    }
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def _place(baseline: Path, name: str) -> dict[str, object]:
    """Return the line of a training's entry in a baseline file."""
    key = f"{json.dumps(name, ensure_ascii=False)}: {{"
    lines = baseline.read_text(encoding="utf-8", errors="replace").splitlines()
    line = next((at for at, text in enumerate(lines, 1) if text.strip() == key), 1)
    # Readers of SARIF take paths relative to the repository, in whose root CI runs commands.
    uri = baseline.relative_to(Path.cwd()) if baseline.is_relative_to(Path.cwd()) else baseline
    place = {"uri": uri.as_posix().lstrip("/")}
    return {"physicalLocation": {"artifactLocation": place, "region": {"startLine": line}}}


def _junit(comparison: Comparison) -> str:
    """Return JUnit's XML with a test case for each gate and run."""
    results = comparison.gates
    suite = Element("testsuite", name="memlog", tests=str(len(results)))
    suite.set("failures", str(sum(result.failed is True for result in results)))
    suite.set("errors", str(sum(result.failed is None for result in results)))
    for result in results:
        _add_case(suite, result)
    suites = Element("testsuites")
    suites.append(suite)
    indent(suites)
    return tostring(suites, encoding="unicode", xml_declaration=False)


def _add_case(suite: Element, result: GateResult) -> None:
    case = SubElement(
        suite, "testcase", classname=one_line(f"memlog.{result.run}"), name=one_line(result.gate)
    )
    if result.failed is not False:
        kind = "error" if result.failed is None else "failure"
        SubElement(case, kind, message=one_line(result.text))
