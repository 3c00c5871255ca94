"""The chart of costs: time that memlog adds to a training step, beside the trackers' calls and other tracers.

``python -m docs_site.overhead_chart`` draws ``docs/images/overhead-{light,dark}.svg`` from the figures in
``docs/project/benchmarks.md`` and ``docs/project/benchmarks-layers.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1] / "docs"
_RATIO = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


class Bar(NamedTuple):
    """Time added to a step, in per cent of the bare step, with the interval of the measurement."""

    label: str
    added: float
    low: float
    high: float

    @property
    def ours(self) -> bool:
        """True for memlog's own figures."""
        return self.label.startswith("memlog")


class Panel(NamedTuple):
    """Bars that share an axis."""

    title: str
    bars: list[Bar]


class Colors(NamedTuple):
    """Colours of a scheme."""

    text: str
    faint: str
    ours: str
    others: str


SCHEMES = {
    "light": Colors("#1f2328", "#59636e", "#3f51b5", "#b0b7c3"),
    "dark": Colors("#e6edf3", "#9198a1", "#8c9eff", "#59636e"),
}
_LABELS = {
    "memlog, local": "memlog, its journal alone",
    "memlog, within its budget, 500 steps": "memlog, layers=True",
    "memlog, every step": "memlog, every step traced",
    "torch.profiler(profile_memory=True)": "torch.profiler, with memory",
}
_LEFT_OUT = {"bare", "memlog, MLflow and W&B", "wandb.log, memlog in process"}
_WIDTH, _LABEL_WIDTH, _VALUE_WIDTH = 760, 230, 70
_ROW, _PANEL_HEAD = 24, 44


def panels() -> list[Panel]:
    """Read the figures of both pages."""
    steps = (
        (DOCS / "project" / "benchmarks.md")
        .read_text(encoding="utf-8")
        .partition("One batch event")[0]
    )
    layers = (DOCS / "project" / "benchmarks-layers.md").read_text(encoding="utf-8")
    gpt = re.split(r"^A (?=[A-Z])", layers, flags=re.MULTILINE)[1]
    assert gpt.startswith("GPT"), gpt[:20]  # noqa: S101 - the page's own order
    return [
        Panel("Time added to a step of 1 ms by recording its memory or metrics", _bars(steps)),
        Panel("Time added to a GPT's step by showing the memory of its layers", _bars(gpt)),
    ]


def _bars(page: str) -> list[Bar]:
    """Return the bars of the rows that have a ratio in their third column, the cheapest first."""
    found = []
    for line in page.splitlines():
        cells = line.split(" | ")
        label = cells[0].removeprefix("| ")
        ratio = _RATIO.search(cells[2]) if len(cells) > 2 else None  # noqa: PLR2004 - the column
        if ratio and label not in _LEFT_OUT:
            added, low, high = (100 * (float(number) - 1) for number in ratio.groups())
            found.append(Bar(_LABELS.get(label, label), added, low, high))
    return sorted(found, key=lambda bar: bar.added)


def draw(colors: Colors) -> str:
    """Return the chart as SVG, in the colours of a scheme."""
    parts, top = [], 0
    for panel in panels():
        parts.append(_text(0, top + 20, panel.title, colors.text, weight="600"))
        parts += _rows(panel, top + _PANEL_HEAD, colors)
        top += _PANEL_HEAD + _ROW * len(panel.bars) + 16
    height = top - 8
    title = "Time added to a training step, in per cent"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13" role="img">\n'
        f"<title>{title}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _rows(panel: Panel, top: int, colors: Colors) -> Iterator[str]:
    longest = max(bar.high for bar in panel.bars)
    scale = (_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / longest
    for index, bar in enumerate(panel.bars):
        y = top + _ROW * index
        width = max(bar.added * scale, 1)
        ends = [_LABEL_WIDTH + max(end, 0) * scale for end in (bar.low, bar.high)]
        color = colors.ours if bar.ours else colors.others
        yield _text(_LABEL_WIDTH - 10, y + 13, bar.label, colors.text, anchor="end")
        yield f'<rect x="{_LABEL_WIDTH}" y="{y + 1}" width="{width:.1f}" height="16" rx="2" fill="{color}"/>'
        yield (
            f'<path d="M{ends[0]:.1f} {y + 9}H{ends[1]:.1f}" stroke="{colors.faint}" stroke-width="1.5"/>'
        )
        yield _text(ends[1] + 8, y + 13, f"+{bar.added:.0f} %", colors.text)


def _text(
    x: float, y: float, text: str, color: str, *, anchor: str = "start", weight: str = "400"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def main() -> None:
    """Write both pictures."""
    for scheme, colors in SCHEMES.items():
        (DOCS / "images" / f"overhead-{scheme}.svg").write_text(draw(colors), encoding="utf-8")


if __name__ == "__main__":
    main()
