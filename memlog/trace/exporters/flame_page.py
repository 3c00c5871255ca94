"""HTML page with a flame graph, for programs that can show HTML but not speedscope files.

The page is one file. It has no scripts and loads nothing, so a sandboxed frame can show it, and a browser can
print it. Tables below the drawing hold the same figures, for screen readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from memlog._internal.terminal import format_bytes

_COLOURS = {
    "[parameters]": "#6f92ee",
    "[buffers]": "#5fcac7",
    "[gradients]": "#e9b949",
    "[optimizer state]": "#b08bea",
    "[activations]": "#ff8a70",
    "[recompute]": "#bd9274",
    "[temporaries]": "#98a3b0",
    "[inputs]": "#5cc48c",
    "[workspaces]": "#b5bf5a",
    "[private pools]": "#e58bc0",
    "[unsharded parameters]": "#a9c4ff",
    "[communication]": "#d9b45b",
}
"""Colours of the categories, the same as in a run's report in dark mode. Black text is legible on them."""
_OTHER_COLOUR = "#b9bdc4"
_OF_LAYERS = (
    "Each bar is a layer, as wide as the bytes that it held when the traced step needed most; below it are "
    "the categories of these bytes."
)
_SMALLEST = 0.001
"""Minimum size of a box, as a fraction of all bytes. A smaller box would be narrower than a pixel."""
_SMALLEST_WITH_TEXT = 0.012
"""Minimum size of a box with text, as a fraction of all bytes. A smaller box has no room for text."""
_MOST_ROWS = 25

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --layer: #e4e8ec; --line: #d0d5db; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #15181c; --layer: #363c44; --line: #454c55; }
}
body { margin: 1rem; background: var(--paper); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
h1 { font-size: 1.25rem; margin: 0 0 .25rem; } h2 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; }
.graph { position: relative; }
.graph div { position: absolute; height: 21px; box-sizing: border-box; text-indent: 4px;
  border: solid var(--paper); border-width: 0 1px 1px 0; background: var(--layer);
  overflow: hidden; white-space: nowrap; text-overflow: ellipsis; font: 12px/20px ui-monospace, monospace; }
.graph .c, .swatch { color: #111; }
.swatch { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -1px; }
table { border-collapse: collapse; max-width: 100%; } th { text-align: left; }
td, th { padding: .15rem 1rem .15rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td + td, th + th { text-align: right; white-space: nowrap; }
code { font: 12px ui-monospace, monospace; }
"""


class _Node:
    def __init__(self) -> None:
        self.size = 0
        self.children: dict[str, _Node] = {}


class _Box(msgspec.Struct, frozen=True):
    name: str
    size: int
    depth: int
    left: float
    """Distance from the left edge of the drawing, as a fraction of the drawing's width."""


def flame_page(
    document: Mapping[str, Any], *, intro: str = _OF_LAYERS, holder: str = "layer"
) -> str | None:
    """Return the page of a document's first profile; ``None`` if that profile holds no bytes.

    Args:
        document: A document of `memlog.trace.exporters.flame_graph` or `snapshot_graph`.
        intro: Sentence that describes the drawing.
        holder: Heading of the first column in the table of the largest holders. A holder is a stack's
            innermost frame that is not a category.
    """
    if not document["profiles"]:
        return None  # a damaged snapshot whose blocks all have no bytes
    profile = document["profiles"][0]
    if profile["unit"] != "bytes" or not profile["endValue"]:
        return None
    names = [frame["name"] for frame in document["shared"]["frames"]]
    root, categories, holders = _Node(), Counter[str](), Counter[str]()
    for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
        stack = [names[frame] for frame in sample]
        if _is_category(stack[-1]):
            categories[stack[-1]] += weight
        holders[stack[-2] if _is_category(stack[-1]) and len(stack) > 1 else stack[-1]] += weight
        root.size += weight
        node = root
        for name in stack:
            node = node.children.setdefault(name, _Node())
            node.size += weight
    tables = [_table(holder, "What holds most", holders, root.size)]
    if categories.total() == root.size:
        tables.insert(0, _table("category", "What the memory is", categories, root.size))
    return _page(profile["name"], intro, list(_boxes(root)), root.size, tables)


def _is_category(name: str) -> bool:
    return name.startswith("[") and name.endswith("]")


def _boxes(root: _Node) -> Iterator[_Box]:
    """Yield a box for each node below ``root``, but not for tiny nodes. The largest child is leftmost."""
    waiting = [(root, 0, 0.0)]
    while waiting:
        node, depth, left = waiting.pop()
        for name, child in sorted(node.children.items(), key=lambda item: -item[1].size):
            if child.size >= _SMALLEST * root.size:
                yield _Box(name, child.size, depth, left)
                waiting.append((child, depth + 1, left))
            left += child.size / root.size


def _page(title: str, intro: str, boxes: list[_Box], total: int, tables: Sequence[str]) -> str:
    height = 21 * (1 + max((box.depth for box in boxes), default=0))
    drawn = "\n".join(_box(box, total) for box in boxes)
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<h1>{escape(title)}</h1>
<p>{escape(intro)} <code>memlog open</code> shows the file beside this page with zoom and search.</p>
<div class="graph" role="img" aria-label="The figures are in the tables below" style="height:{height}px">
{drawn}
</div>
{"".join(tables)}
</html>
"""


def _box(box: _Box, total: int) -> str:
    share = box.size / total
    place = f"left:{box.left:.4%};width:{share:.4%};top:{21 * box.depth}px"
    colour = f";background:{_colour(box.name)}" if _is_category(box.name) else ""
    kind = ' class="c"' if colour else ""
    text = escape(box.name.strip("[]")) if share >= _SMALLEST_WITH_TEXT else ""
    told = escape(f"{box.name}: {format_bytes(box.size)}, {share:.1%}")
    return f'<div{kind} style="{place}{colour}" title="{told}">{text}</div>'


def _colour(category: str) -> str:
    return _COLOURS.get(category, _OTHER_COLOUR)


def _table(column: str, heading: str, sizes: Mapping[str, int], total: int) -> str:
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    rows = [
        f"<tr><td>{_swatch(name) if _is_category(name) else ''}<code>{escape(name.strip('[]'))}</code>"
        f"</td><td>{format_bytes(size)}</td><td>{size / total:.1%}</td></tr>"
        for name, size in ranked[:_MOST_ROWS]
    ]
    more = len(ranked) - _MOST_ROWS
    note = f"<p>{more:,} smaller ones are left out.</p>" if more > 0 else ""
    head = f"<tr><th>{column}</th><th>size</th><th>share</th></tr>"
    return f"<h2>{heading}</h2>\n<table>{head}{''.join(rows)}</table>{note}\n"


def _swatch(category: str) -> str:
    return f'<span class="swatch" style="background:{_colour(category)}"></span>'
