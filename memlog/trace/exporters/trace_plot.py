"""Drawing of an allocator's snapshot: each storage is a band from the allocation to the free.

PyTorch's own page for such drawings loads a library from the network. memlog's page is HTML with an SVG
drawing. It has no script and fetches nothing.
"""

from __future__ import annotations

import html
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from memlog._internal.units import format_bytes
from memlog.trace.exporters.snapshot_reading import Change, DeviceSnapshot, printable, read_devices

_MAX_BANDS = 400
"""Maximum number of storages with a band of their own. All smaller storages form one grey band."""
_WIDTH, _HEIGHT, _MARGIN = 1200.0, 500.0, 90.0
_TICKS = 5
_FRAMES = 12


class _Band:
    def __init__(self, change: Change, at: int, level: int) -> None:
        self.size = change.size
        self.label = _label(change)
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
        top: Upper edge, as pairs of the number of changes so far and the live bytes of all storages.
    """

    def __init__(self, changes: list[Change]) -> None:
        self.bands: list[_Band] = []
        self.top = [(0, 0)]
        self._stack: list[_Band] = []
        self._live: dict[int, tuple[_Band | None, int]] = {}
        self._level = 0
        self._others = 0
        drawn = _largest(changes)
        for at, change in enumerate(changes):
            if change.is_alloc:
                self._allocate(at, change, drawn=at in drawn)
            else:
                self._free(at, change.address)
            self.top.append((at + 1, self._level + self._others))
        for band in self._stack:
            band.end(len(changes))

    def _allocate(self, at: int, change: Change, *, drawn: bool) -> None:
        band = _Band(change, at, self._level) if drawn else None
        self._live[change.address] = band, change.size
        if band is None:
            self._others += change.size
            return
        self._level += change.size
        self._stack.append(band)
        self.bands.append(band)

    def _free(self, at: int, address: int) -> None:
        band, size = self._live.pop(address, (None, 0))
        if band is None:
            self._others -= size
            return
        self._level -= size
        band.end(at)
        index = self._stack.index(band)
        del self._stack[index]
        for above in self._stack[index:]:
            above.move(at, size)


def trace_plot(snapshot: Mapping[str, Any], title: str) -> str:
    """Draw a snapshot that torch or memlog wrote, as an HTML page.

    Raises:
        SnapshotError: The snapshot does not have the form that torch writes.
    """
    drawings = [
        _section(number, _Drawing(changes))
        for number, device in read_devices(snapshot, title).items()
        if (changes := _changes(device))
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


def _changes(device: DeviceSnapshot) -> list[Change]:
    """Return an allocation for each storage that was live before the history, followed by the history."""
    before = [
        Change(address, size, True, source or {})
        for address, (source, size) in device.before().items()
    ]
    return [*before, *device.history]


def _largest(changes: list[Change]) -> set[int]:
    """Return the indices of the `_MAX_BANDS` largest allocations in ``changes``."""
    numbers = [number for number, change in enumerate(changes) if change.is_alloc and change.size]
    numbers.sort(key=lambda number: -changes[number].size)
    return set(numbers[:_MAX_BANDS])


def _section(device: int, drawing: _Drawing) -> str:
    changes, peak = len(drawing.top) - 1, max(level for _, level in drawing.top)
    across, up = _WIDTH / changes, _HEIGHT / max(peak, 1)

    def path(points: Iterable[tuple[int, int]]) -> str:
        placed = (f"{_MARGIN + x * across:.1f} {_HEIGHT - y * up:.1f}" for x, y in points)
        return "M" + "L".join(placed) + "Z"

    outline = [(0, 0), *drawing.top, (changes, 0)]
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


def _label(change: Change) -> str:
    frames = change.source.get("frames")
    names = [
        printable(frame["name"])
        if isinstance(frame, dict) and isinstance(frame.get("name"), str)
        else "?"
        for frame in (frames[:_FRAMES] if isinstance(frames, list) else ())
    ]
    return "\n".join([format_bytes(change.size), *names])


def _colour(label: str) -> str:
    """Return the colour of a storage. Storages with the same stack have the same colour."""
    origin = label.partition("\n")[2]
    return f"hsl({zlib.crc32(origin.encode('utf-8', 'replace')) % 360} 60% 60%)"
