"""HTML pages of a flame graph and of an allocator's snapshot, drawn over time.

The page is one file. It has no scripts and loads nothing, so a sandboxed frame can show it, and a browser can
print it. Tables below the drawing hold the same figures, for screen readers.

PyTorch's own page for such drawings loads a library from the network. memlog's page is HTML with an SVG
drawing. It has no script and fetches nothing.
"""

from __future__ import annotations

import heapq
import html
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain, islice
from typing import Any

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.trace.exporters.snapshots import Changes, printable, read_changes

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


_MAX_BANDS = 400
"""Maximum number of storages with a band of their own. All smaller storages form one grey band."""
_WIDTH, _HEIGHT, _MARGIN = 1200.0, 500.0, 90.0
_TICKS = 5
_FRAMES = 12
_AT_ONCE = 1000


class _Band:
    def __init__(self, size: int, label: str, at: int, level: int) -> None:
        self.size = size
        self.label = label
        self.edge = [(at, level)]

    def move(self, at: int, down: int) -> None:
        level = self.edge[-1][1]
        self.edge += [(at, level), (at + 1, level - down)]

    def end(self, at: int) -> None:
        self.edge.append((at, self.edge[-1][1]))


class _Drawing:
    """Layout of all storages over a device's history.

    Attributes:
        bands: Storages with a band of their own.
        top: Upper edge: live bytes of all storages after each number of changes.
    """

    def __init__(self, changes: Changes, labels: dict[int, str]) -> None:
        self.bands: list[_Band] = []
        self.top = array("q", [0])
        self._stack: list[_Band] = []
        self._live: dict[int, _Band | int] = {}
        """Band or bytes of each live storage, by address."""
        self._level = 0
        self._others = 0
        for at, (address, size, is_alloc) in enumerate(changes):
            if not is_alloc:
                self._free(at, address)
            elif at in labels:
                self._draw(address, _Band(size, labels[at], at, self._level))
            else:
                self._live[address] = size
                self._others += size
            self.top.append(self._level + self._others)
        for band in self._stack:
            band.end(len(changes))

    def _draw(self, address: int, band: _Band) -> None:
        self._live[address] = band
        self._level += band.size
        self._stack.append(band)
        self.bands.append(band)

    def _free(self, at: int, address: int) -> None:
        band = self._live.pop(address, 0)
        if isinstance(band, int):
            self._others -= band
            return
        self._level -= band.size
        band.end(at)
        index = self._stack.index(band)
        del self._stack[index]
        for above in self._stack[index:]:
            above.move(at, band.size)


def trace_plot(
    snapshot: Mapping[str, Any], title: str, frames: Callable[[Any], Any] = lambda stack: stack
) -> str:
    """Draw a snapshot that torch or memlog wrote, as an HTML page.

    Args:
        snapshot: The snapshot. Its lists of blocks and of changes can contain `Entries`.
        title: Heading of the page.
        frames: Function that returns the list of frames of a stack of `Entries`.

    Raises:
        SnapshotError: The snapshot does not have the form that torch writes.
    """
    drawings = [
        _section(number, _Drawing(changes, _labels(changes, frames)))
        for number, changes in read_changes(snapshot, title).items()
    ]
    body = "\n".join(drawings) or "<p>The snapshot holds no history: nothing was recorded.</p>"
    heading = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
        "<style>body{font-family:sans-serif;margin:1em}svg{width:100%;height:auto}"
        "path:hover{stroke:#000}</style></head>\n"
        f"<body><h1>{heading}</h1>\n"
        "<p>Each band is a storage; its tooltip has its size and stack. From left to right: each allocation "
        f"and each free, in order.</p>\n{body}\n</body></html>\n"
    )


def _labels(changes: Changes, frames: Callable[[Any], Any]) -> dict[int, str]:
    """Return the labels of the `_MAX_BANDS` largest allocations, by their indices in ``changes``."""
    sizes = changes.sizes
    numbers = (number for number, (_, size, is_alloc) in enumerate(changes) if is_alloc and size)
    largest = heapq.nsmallest(_MAX_BANDS, numbers, key=lambda number: -sizes[number])
    return {number: _label(sizes[number], frames(changes.stacks[number])) for number in largest}


def _section(device: int, drawing: _Drawing) -> str:
    changes, peak = len(drawing.top) - 1, max(drawing.top)
    across, up = _WIDTH / changes, _HEIGHT / max(peak, 1)

    def path(points: Iterable[tuple[int, int]]) -> str:
        placed = (f"{_MARGIN + x * across:.1f} {_HEIGHT - y * up:.1f}" for x, y in points)
        # Joined in parts, because the points as separate texts would take ten times as much memory.
        parts = iter(lambda: "L".join(islice(placed, _AT_ONCE)), "")
        return "M" + "L".join(parts) + "Z"

    outline = chain([(0, 0)], enumerate(drawing.top), [(changes, 0)])
    shapes = [f'<path d="{path(outline)}" fill="#bbb"><title>all others</title></path>']
    for band in drawing.bands:
        # The upper edge is drawn backwards, so that the two edges form one outline.
        upper = [(x, y + band.size) for x, y in reversed(band.edge)]
        shapes.append(
            f'<path d="{path([*band.edge, *upper])}" fill="{_colour_of_band(band.label)}">'
            f"<title>{html.escape(band.label)}</title></path>"
        )
    ticks = [
        f'<text x="{_MARGIN - 8:.0f}" y="{_HEIGHT * (1 - part / _TICKS) + 5:.0f}" text-anchor="end" '
        f'font-size="14">{format_bytes(peak * part / _TICKS)}</text>'
        for part in range(_TICKS + 1)
    ]
    box = f"0 -15 {_MARGIN + _WIDTH:.0f} {_HEIGHT + 30:.0f}"
    return (
        f"<h2>Device {device}: {format_bytes(peak)} at the peak</h2>\n"
        f'<svg viewBox="{box}" xmlns="http://www.w3.org/2000/svg">\n'
        + "\n".join([*shapes, *ticks])
        + "\n</svg>"
    )


def _label(size: int, frames: Any) -> str:
    names = [
        printable(frame["name"])
        if isinstance(frame, dict) and isinstance(frame.get("name"), str)
        else "?"
        for frame in (frames[:_FRAMES] if isinstance(frames, list) else ())
    ]
    return "\n".join([format_bytes(size), *names])


def _colour_of_band(label: str) -> str:
    """Return the colour of a storage. Storages with the same stack have the same colour."""
    origin = label.partition("\n")[2]
    return f"hsl({zlib.crc32(origin.encode('utf-8', 'replace')) % 360} 60% 60%)"
