"""``memlog watch``: a run's memory while it trains: bars, a sparkline, growth, alerts and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memlog._internal.terminal import format_bytes, format_duration, one_line
from memlog.cli import SETTINGS
from memlog.cli.completion import complete_runs
from memlog.cli.output import (
    LEVEL_STYLES,
    STATUS_STYLES,
    dir_option,
    find_explained_run,
    json_option,
    notice,
    page,
    plain,
    print_json,
    sign,
    table,
)
from memlog.errors import RunNotFoundError
from memlog.facts.run_fold import RunStatus
from memlog.findings import beyond
from memlog.journal import RunDirectory, list_runs
from memlog.ranks.registration import lowest_rank, ranks_of
from memlog.reports import encode
from memlog.reports.accumulator import highest_of
from memlog.reports.live import LiveMemory, LiveRank, LiveRun, LiveState
from memlog.reports.schema import AlertFacts
from memlog.settings import runs_directory

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
        f"{kind.name} {format_bytes(kind.current_bytes)}, peak {format_bytes(kind.peak_bytes)}"
        + ("" if kind.limit_bytes is None else f" of {format_bytes(kind.limit_bytes)}")
        for kind in state.memory
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
    for kind in memory:
        limit = "-" if kind.limit_bytes is None else format_bytes(kind.limit_bytes)
        sizes = (format_bytes(kind.current_bytes), format_bytes(kind.peak_bytes), limit)
        rows.add_row(plain(kind.name), *sizes, _bar(console, kind, width))
        if len(kind.history_bytes) > 1:
            rows.add_row("", "", "", "", _sparkline(console, kind.history_bytes, width))
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
        _counted(count, noun)
        for count, noun in ((state.dropped, "dropped event"), (state.faults, "fault"))
        if count
    ]
    return f"memlog: {', '.join(parts)} (`{_show(state)}` lists them)"


def _show(state: LiveState) -> str:
    return RunDirectory(Path(state.directory)).command("show")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


_IN_A_TERMINAL = 1.0
_IN_A_PIPE = 10.0
"""Seconds between two readings if the output is not a terminal and ``--interval`` is not given."""
_RANKS_EVERY = 5.0
"""Seconds between two searches for other ranks. A rank may begin later than the run that is watched."""
_END_WRITTEN_WITHIN = 3.0
"""If the training process is gone and the journal does not say how the run ended, memlog goes on reading for
at most these seconds. In this time, the helper process can write how the run ended."""


@click.command(context_settings=SETTINGS)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=complete_runs)
@click.option("--once", is_flag=True, help="Show the present state and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Seconds between two readings (default 1; without a terminal 10).",
)
@json_option
@dir_option
def watch(
    run: str | None, once: bool, interval: float | None, directory: Path | None, as_json: bool
) -> None:
    """Show a run's memory while it trains.

    The page is renewed until the run ends or you press Ctrl-C. RUN is a run's id or the id's beginning, its
    name in a tracker, or "latest"; by default the newest run that is still training. If the output is not a
    terminal, each reading is printed as one line. With --json, each reading is printed as one document
    (docs/watch.md explains its fields).
    """
    root = runs_directory(directory)
    follower = _Follower(_newest_live(root) if run is None else find_explained_run(root, run))
    if once:
        _show_once(follower.read(), as_json=as_json)
        return
    console = Console(highlight=False, markup=False, emoji=False)
    in_place = console.is_terminal and not console.is_dumb_terminal and not as_json
    pause = interval or (_IN_A_TERMINAL if console.is_terminal else _IN_A_PIPE)
    try:
        if in_place:
            _show_in_place(console, follower, pause)
        else:
            _follow(follower, pause, _print_json if as_json else _print_line)
    except KeyboardInterrupt:
        notice("no longer watched, the run goes on")


def _newest_live(root: Path) -> RunDirectory:
    runs = list_runs(root)
    # `list_runs` returns the oldest first.
    for run in reversed(runs):
        if run.is_alive() and run.end() is None:
            lowest = lowest_rank(run)
            return run if lowest.end() else lowest
    newest = f", the newest is {runs[-1].id}: `{runs[-1].command('show')}`" if runs else ""
    raise RunNotFoundError(
        f"no run in {root} is training now{newest}; `memlog watch RUN` shows one that has ended"
    )


class _Follower:
    """Reader of a run's new events. It also reads the runs of the other ranks of the training."""

    def __init__(self, run: RunDirectory) -> None:
        self._own = LiveRun(run)
        self._ranks: dict[int, LiveRun] = {}
        self._search_due = 0.0

    def read(self) -> LiveState:
        try:
            self._own.update()
            self._find_ranks()
            for other in self._ranks.values():
                if other is not self._own:
                    other.update()
        except FileNotFoundError as error:
            raise RunNotFoundError(
                f"the folder {self._own.run.path} is gone: `memlog runs` lists what there is"
            ) from error
        return self._own.state([live.as_rank(rank) for rank, live in sorted(self._ranks.items())])

    def _find_ranks(self) -> None:
        if time.monotonic() < self._search_due:
            return
        self._search_due = time.monotonic() + _RANKS_EVERY
        for rank, run in ranks_of(self._own.run).items():
            if run.id == self._own.run.id:
                self._ranks[rank] = self._own
            elif rank not in self._ranks:
                self._ranks[rank] = LiveRun(run)


def _follow(follower: _Follower, pause: float, show: Callable[[LiveState], object]) -> LiveState:
    """Show the state after each pause until the run has ended, and return the last state."""
    state = follower.read()
    was_running = state.status == "running"
    while state.status == "running":
        show(state)
        time.sleep(pause)
        state = follower.read()
    deadline = time.monotonic() + _END_WRITTEN_WITHIN
    while was_running and state.status == "killed" and time.monotonic() < deadline:
        time.sleep(0.2)
        state = follower.read()
    show(state)
    return state


def _show_in_place(console: Console, follower: _Follower, pause: float) -> None:
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        last = _follow(
            follower, pause, lambda state: live.update(page_of(console, state), refresh=True)
        )
    console.print(plain(ended(last)))


def _show_once(state: LiveState, *, as_json: bool) -> None:
    if as_json:
        print_json(encode(state))
        return
    with page() as console:
        console.print(page_of(console, state))
        if state.status != "running":
            console.print(plain(ended(state)))


def _print_json(state: LiveState) -> None:
    print_json(msgspec.json.encode(state, order="sorted"))


def _print_line(state: LiveState) -> None:
    click.echo(one_line(line_of(state)))
    if state.status != "running":
        click.echo(one_line(ended(state)))
