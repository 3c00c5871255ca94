"""Sections of the page about a traced step: the icicle of layers, the largest layers, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

from memlog._internal.units import format_bytes
from memlog.events import Trace
from memlog.reports.page import drawings
from memlog.reports.page.layers import LayerRow, Node, nodes
from memlog.reports.page.markup import Child, TableRow, el, prose, table
from memlog.reports.page.sections import section
from memlog.trace.predict import Advice


class ShownStep(NamedTuple):
    """Memory at the peak of a traced step, as the page shows it."""

    title: str
    tree: Node
    rows: list[LayerRow]
    advice: Advice | None
    remark: str | None
    """Remark that another step of the run was larger; ``None``: no larger step is known."""


def icicle(step: ShownStep) -> Element:
    """Return the section with the layers as an icicle, which a script draws."""
    controls = el(
        "div",
        el(
            "label",
            "Find a layer ",
            el(
                "input",
                type="search",
                id="find",
                placeholder="mlp, attention, …",
                autocomplete="off",
            ),
        ),
        el("span", id="found", role="status"),
        el("button", "Whole model", type="button", id="whole", hidden=True),
        class_="controls",
        id="icicle-controls",
        hidden=True,
    )
    names = sorted({node.category for node in nodes(step.tree)} - {""})
    return section(
        "layers", "Which layer holds it",
        el("p", f"{step.title}: {format_bytes(step.tree.size)} at the peak."),
        controls,
        el("div", id="icicle", class_="icicle"),
        el("p", id="icicle-status", role="status", class_="note"),
        drawings.legend(names) if names else None,
        el("noscript", el("p", "The picture of the layers needs scripts; the table below has the largest.")),
    )  # fmt: skip


def largest(step: ShownStep) -> Element | None:
    """Return the section with the largest layers and what would help; ``None`` if neither is known."""
    helps = _what_helps(step)
    if not step.rows and not helps:
        return None
    return section(
        "largest",
        "The largest layers, and what would make them smaller",
        *_table(step.rows),
        *helps,
    )


def _table(rows: Sequence[LayerRow]) -> list[Child]:
    if not rows:
        return []
    most = max(1, *(row.at_peak for row in rows))
    cells: list[TableRow] = [
        [
            el("code", row.path),
            row.kind,
            [
                format_bytes(row.at_peak),
                drawings.share_bar(row.at_peak / most, drawings.color(row.mostly)),
            ],
            row.mostly,
            format_bytes(row.allocated),
        ]
        for row in rows
    ]
    headings = ["layer or line", "class", "held at the peak", "mostly", "allocated in the step"]
    return [table("The largest layers", headings, cells, numbers=(4,))]


def _what_helps(step: ShownStep) -> list[Child]:
    advice, parts = step.advice, list[Child]()
    if advice is None:
        return parts
    if step.remark:
        parts.append(el("p", *prose(step.remark), class_="note"))
    if advice.hints:
        rows: list[TableRow] = [
            [
                prose(hint.what),
                format_bytes(hint.peak),
                [
                    f"{format_bytes(hint.saved)}, {hint.share:.0%}",
                    drawings.share_bar(hint.share, "saved"),
                ],
            ]
            for hint in advice.hints
        ]
        headings = ["what would help", "predicted peak", "saved"]
        parts.append(table("What would help", headings, rows, numbers=(1,)))
    else:
        parts.append(el("p", "Nothing that memlog can predict would make it smaller."))
    return parts + [el("p", *prose(note), class_="note") for note in advice.notes]


def step_title(event: Trace, model: str) -> str:
    """Return the name of a traced step, such as ``GPT, step 160``."""
    step = "a step that did not end" if event.step is None else f"step {event.step:,}"
    return f"{model}, {step}" if model else step.capitalize()
