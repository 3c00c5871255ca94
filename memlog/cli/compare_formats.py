"""Output of ``memlog compare`` for other programs: Markdown, GitHub's annotations, SARIF and JUnit's XML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from memlog._internal.terminal import format_bytes, one_line
from memlog._version import __version__
from memlog.cli.compare import shown_figures
from memlog.reports.compare import Compared, Comparison
from memlog.reports.figures import Unit, value_text
from memlog.reports.gates import GateResult

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
        yield f"**Gates: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}**"
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
    place = {"uri": baseline.as_posix().lstrip("/")}
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
