"""Drawing of an allocator's snapshot: each storage is a band from the allocation to the free.

PyTorch's own page for such drawings loads a library from the network. memlog's page is HTML with an SVG
drawing. It has no script and fetches nothing.
"""

from __future__ import annotations

import heapq
import html
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any

from memlog._internal.terminal import format_bytes
from memlog.trace.exporters.snapshot_columns import Changes, read_changes
from memlog.trace.exporters.snapshot_reading import printable

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
        upper = [(x, y + band.size) for x, y in reversed(band.edge)]
        shapes.append(
            f'<path d="{path([*band.edge, *upper])}" fill="{_colour(band.label)}">'
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


def _colour(label: str) -> str:
    """Return the colour of a storage. Storages with the same stack have the same colour."""
    origin = label.partition("\n")[2]
    return f"hsl({zlib.crc32(origin.encode('utf-8', 'replace')) % 360} 60% 60%)"
