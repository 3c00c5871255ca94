"""Page of ``memlog watch``: bars, a sparkline, growth, alerts and ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memlog._internal.units import format_bytes, format_duration
from memlog.cli.output import LEVEL_STYLES, STATUS_STYLES, plain, sign, table
from memlog.facts.run_fold import RunStatus
from memlog.findings import beyond
from memlog.journal import RunDirectory
from memlog.reports.history import highest_of
from memlog.reports.live import LiveMemory, LiveRank, LiveState
from memlog.reports.schema import AlertFacts

_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = "_.-=oO#"
_PIPE_BAR = 30
_LEAST_BAR, _MOST_BAR = 8, 60
_TIGHT, _FULL = 0.8, 0.95
"""Fractions of a limit from which a bar is yellow (`_TIGHT`) and red (`_FULL`)."""
_LEAST_RANGE = 0.2
"""Minimum range of values that a sparkline's height stands for, as a fraction of the highest value. With a
smaller range, small changes would look large."""
_BESIDE_BAR = 54
"""Width of a row of the memory table without its bar, in columns."""
_ENDS: dict[RunStatus, str] = {
    "running": "is still running",
    "finished": "has finished",
    "failed": "has failed",
    "killed": "was killed, or its process is gone",
}


def page_of(console: Console, state: LiveState) -> RenderableType:
    parts: list[RenderableType] = [_head(state), Text()]
    if state.memory:
        parts += [_memory(console, state.memory), Text()]
    style = "bold yellow" if state.findings else "bold"
    parts.append(plain(state.verdict, style))
    if state.findings and state.findings[0].remedy:
        parts.append(plain(f"what to do: {state.findings[0].remedy}"))
    alerts = beyond(state.verdict, state.alerts)
    if alerts:
        parts += [Text(), _alerts(console, alerts, state.alerts_total - len(state.alerts))]
    if len(state.ranks) > 1:
        parts += [Text(), _ranks(state.ranks)]
    if state.dropped or state.faults:
        parts += [Text(), plain(_health(state), "yellow")]
    return Group(*parts)


def line_of(state: LiveState) -> str:
    memory = "; ".join(
        f"{one.name} {format_bytes(one.current_bytes)}, peak {format_bytes(one.peak_bytes)}"
        + ("" if one.limit_bytes is None else f" of {format_bytes(one.limit_bytes)}")
        for one in state.memory
    )
    extra = f"; {state.findings[0].title}" if state.findings else ""
    if state.alerts_total:
        extra += f"; {_counted(state.alerts_total, 'alert')}"
    return f"{state.run} {_progress(state)}: {memory or 'nothing recorded yet'}{extra}"


def ended(state: LiveState) -> str:
    """Return a line that says how the run ended, and names the command that shows the run."""
    return f"run {state.run} {_ENDS[state.status]}: `{_show(state)}`"


def _head(state: LiveState) -> Text:
    head = Text.assemble(
        "run ", plain(state.run, "bold"), "  ", (state.status, STATUS_STYLES[state.status])
    )
    if state.names:
        head.append("  ").append(plain(state.names[0]))
    return head.append("\n").append(plain(_progress(state)))


def _progress(state: LiveState) -> str:
    parts = []
    if state.step is not None:
        parts.append(f"step {state.step:,}")
    if state.evaluation is not None:
        parts.append(f"evaluation {state.evaluation:,}")
    if state.epoch is not None:
        parts.append(f"epoch {state.epoch:,}")
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4g}")
    if state.steps_per_s is not None:
        parts.append(f"{state.steps_per_s:.3g} steps/s")
    if state.elapsed_s is not None:
        parts.append(f"after {format_duration(state.elapsed_s)}")
    return ", ".join(parts) or "no step yet"


def _memory(console: Console, memory: Sequence[LiveMemory]) -> Table:
    rows = _grid(("memory", "now", "peak", "limit", ""), left={"memory", ""})
    width = _bar_width(console)
    for one in memory:
        limit = "-" if one.limit_bytes is None else format_bytes(one.limit_bytes)
        sizes = (format_bytes(one.current_bytes), format_bytes(one.peak_bytes), limit)
        rows.add_row(plain(one.name), *sizes, _bar(console, one, width))
        if len(one.history_bytes) > 1:
            rows.add_row("", "", "", "", _sparkline(console, one.history_bytes, width))
    return rows


def _grid(headings: Sequence[str], left: Collection[str]) -> Table:
    """Return a table with only a row of headings. Small gaps let the table fit into 80 characters."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for heading in headings:
        grid.add_column(justify="left" if heading in left else "right", no_wrap=True)
    grid.add_row(*(Text(heading, "dim") for heading in headings))
    return grid


def _bar_width(console: Console) -> int:
    if not console.is_terminal:
        return _PIPE_BAR
    return max(_LEAST_BAR, min(console.width - _BESIDE_BAR, _MOST_BAR))


def _bar(console: Console, memory: LiveMemory, width: int) -> Text:
    """Return a bar of the memory in use, with a mark at the peak.

    The full width is the limit. If there is no limit, the full width is the peak.
    """
    top = memory.limit_bytes or memory.peak_bytes
    if not top or memory.current_bytes is None:
        return Text()
    share = (memory.peak_bytes or memory.current_bytes) / top
    now, peak = (min(round(part * width), width) for part in (memory.current_bytes / top, share))
    style = "red" if share >= _FULL else "yellow" if share >= _TIGHT else "green"
    bar = Text.assemble(
        (sign(console, "█", "#") * now, style if memory.limit_bytes else "cyan"),
        (sign(console, "·", ".") * max(peak - now - 1, 0), "dim"),
        (sign(console, "▌", "|") if peak > now else "", "bold"),
        (sign(console, "·", ".") * (width - max(peak, now)), "dim"),
    )
    return bar.append(f" {share:.0%}") if memory.limit_bytes else bar


def _sparkline(console: Console, values: Sequence[int], width: int) -> Text:
    """Return a line of blocks, scaled so that a change of a few per cent does not look like growth."""
    blocks = _BLOCKS if sign(console, _BLOCKS, "") else _PLAIN_BLOCKS
    shown = highest_of(list(values), width)
    high = max(shown)
    low = min(*shown, (1 - _LEAST_RANGE) * high)
    steps = len(blocks) - 1
    levels = (round((value - low) / (high - low) * steps) if high > low else 0 for value in shown)
    return Text("".join(blocks[level] for level in levels), "cyan")


def _alerts(console: Console, alerts: Sequence[AlertFacts], earlier: int) -> Table:
    heading = f"alert ({earlier:,} earlier)" if earlier else "alert"
    rows = table(console, "at", "level", heading, folded=[heading])
    for alert in alerts:
        rows.add_row(alert.place, plain(alert.level, LEVEL_STYLES[alert.level]), plain(alert.title))
    return rows


def _ranks(ranks: Sequence[LiveRank]) -> Table:
    headings = ("rank", "run", "status", "step", "memory", "now", "peak", "limit", "alerts")
    rows = _grid(headings, left={"run", "status", "memory"})
    for rank in ranks:
        rows.add_row(*_rank_cells(rank))
    return rows


def _rank_cells(rank: LiveRank) -> Iterator[str | Text]:
    yield str(rank.rank)
    yield plain(rank.run)
    yield plain(rank.status, STATUS_STYLES[rank.status])
    yield "-" if rank.step is None else f"{rank.step:,}"
    memory = rank.memory
    yield plain("-" if memory is None else memory.name)
    sizes = (
        (None,) * 3
        if memory is None
        else (memory.current_bytes, memory.peak_bytes, memory.limit_bytes)
    )
    for size in sizes:
        yield "-" if size is None else format_bytes(size)
    yield f"{rank.alerts:,}"


def _health(state: LiveState) -> str:
    parts = [
        _counted(count, what)
        for count, what in ((state.dropped, "dropped event"), (state.faults, "fault"))
        if count
    ]
    return f"memlog: {', '.join(parts)} (`{_show(state)}` lists them)"


def _show(state: LiveState) -> str:
    return RunDirectory(Path(state.directory)).command("show")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
