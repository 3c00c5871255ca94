"""The worst traced step's memory by layer: a tree, a table, and the page's sections about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import Trace
from memlog.reports.page import drawings
from memlog.reports.page.drawings import Child, TableRow, el, prose, table
from memlog.reports.page.sections import section
from memlog.trace.encoding import OUTSIDE_PATH
from memlog.trace.predict import Advice
from memlog.trace.records import RecordedTrace
from memlog.trace.result import with_parents

_MOST_NODES = 4_000
"""Maximum number of nodes of a tree. If there are more, the smallest nodes are merged."""
_DEEPEST = 64
"""Maximum depth of nested layers: memory of deeper layers is added to the layer at this depth. A trace from
an untrusted file can be nested deeper."""
_ROWS = 15
_NUMBER = re.compile(r"([0-9]+)")


class Node(msgspec.Struct):
    """A layer, or a category of memory in a layer."""

    name: str
    """Last part of the layer's path, or the category's name."""
    size: int = 0
    """Bytes of this node and of all nodes below it."""
    category: str = ""
    """Category of memory; empty if the node is a layer."""
    kind: str = ""
    """Name of the layer's class; empty if unknown."""
    children: list[Node] = []

    def child(self, name: str, category: str = "") -> Node:
        """Return the child with a name and category. Add it if it is missing."""
        for known in self.children:
            if known.name == name and known.category == category:
                return known
        made = Node(name, category=category, children=[])
        self.children.append(made)
        return made


class LayerRow(msgspec.Struct, frozen=True):
    """A layer of the table. Sizes are bytes; ``None`` if unknown."""

    path: str
    kind: str
    at_peak: int
    mostly: str
    """Category with the most bytes; empty if unknown."""
    allocated: int | None


def layer_tree(trace: RecordedTrace) -> Node:
    """Return the memory in use at a traced step's peak, by layer and category."""
    kinds = dict(zip(trace.paths, trace.kinds, strict=False))
    root = Node("all", children=[])
    for share in trace.result.shares:
        stack = with_parents(share.path, trace.paths)[:_DEEPEST]
        at = root
        at.size += share.size
        for level, path in enumerate(stack):
            above = stack[level - 1] if level else ""
            at = at.child(_last_part(path, above))
            at.kind = kinds.get(path, "")
            at.size += share.size
        if share.line:
            at = at.child(share.line)
            at.size += share.size
        at.child(share.category, share.category).size += share.size
    return _bounded(root)


def event_tree(event: Trace) -> Node | None:
    """Return the tree of layers in a traced step's journal event; ``None`` if no layers are in the event."""
    held = [(layer.path, layer.at_peak) for layer in event.layers if layer.at_peak]
    if not held or event.peak is None:
        return None
    root = Node("all", size=event.peak, children=[])
    for path, size in held:
        root.child(path).size = size
    rest = event.peak - sum(size for _, size in held)
    if rest > 0:
        root.child("other layers, and outside modules").size = rest
    return _bounded(root)


def layer_rows(trace: RecordedTrace) -> list[LayerRow]:
    """Return the layers and program lines that held most memory at the peak, the largest first."""
    kinds = dict(zip(trace.paths, trace.kinds, strict=False))
    held: dict[str, dict[str, int]] = {}
    for share in trace.result.shares:
        sizes = held.setdefault(share.holder, {})
        sizes[share.category] = sizes.get(share.category, 0) + share.size
    allocated = {layer.path: layer.allocated for layer in trace.result.layers}
    allocated.update({line.line: line.allocated for line in trace.result.lines})
    largest = sorted(held.items(), key=lambda item: (-sum(item[1].values()), _counted(item[0])))
    return [
        LayerRow(
            path=holder,
            kind=kinds.get(holder, ""),
            at_peak=sum(sizes.values()),
            mostly=max(sizes, key=lambda name: sizes[name]),
            allocated=allocated.get(holder),
        )
        for holder, sizes in largest[:_ROWS]
    ]


def _counted(name: str) -> list[str | int]:
    """Return a sorting key that places layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in _NUMBER.split(name)]


def _last_part(path: str, above: str) -> str:
    """Return a layer's path without the path of the layer above it."""
    if path == OUTSIDE_PATH:
        return "outside modules"
    return path.removeprefix(f"{above}.") if above else path


def _bounded(root: Node) -> Node:
    """Sort the nodes by size. If there are too many, merge the smallest nodes."""
    sizes = sorted((node.size for node in nodes(root)), reverse=True)
    least = sizes[_MOST_NODES] if len(sizes) > _MOST_NODES else 0
    for node in nodes(root):
        small = [child for child in node.children if child.size <= least]
        kept = [child for child in node.children if child.size > least]
        kept.sort(key=lambda child: (bool(child.category), -child.size, _counted(child.name)))
        if size := sum(child.size for child in small):
            kept.append(Node(f"{len(small):,} smaller", size=size, children=[]))
        node.children = kept
    return root


def nodes(root: Node) -> Iterable[Node]:
    """Yield all nodes of a tree, each before its children.

    The caller may replace the children of the node that was yielded last.
    """
    waiting = [root]
    while waiting:
        at = waiting.pop()
        yield at
        waiting.extend(at.children)


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
    elif advice.peak is not None:
        parts.append(el("p", "Nothing that memlog can predict would make it smaller."))
    return parts + [el("p", *prose(note), class_="note") for note in advice.notes]


def step_title(event: Trace, model: str) -> str:
    """Return the name of a traced step, such as ``GPT, step 160``."""
    step = "a step that did not end" if event.step is None else f"step {event.step:,}"
    return f"{model}, {step}" if model else step.capitalize()
