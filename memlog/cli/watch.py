"""``memlog watch``: a run's memory while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.live import Live

from memlog._internal.terminal import one_line
from memlog.cli import SETTINGS
from memlog.cli.completing import complete_runs
from memlog.cli.explained_run import find_explained_run
from memlog.cli.options import dir_option, json_option
from memlog.cli.output import notice, page, plain, print_json
from memlog.cli.watch_page import ended, line_of, page_of
from memlog.errors import RunNotFoundError
from memlog.journal import RunDirectory, list_runs
from memlog.ranks.registration import lowest_rank, ranks_of
from memlog.reports import encode
from memlog.reports.live import LiveRun, LiveState
from memlog.settings import runs_directory

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
