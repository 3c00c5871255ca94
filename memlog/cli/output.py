"""Parts of several commands: options, the run that a user names, tables, plain lines, progress bars."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import click
from rich import box
from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from memlog._internal.secret_names import lazy_pattern
from memlog._internal.terminal import one_line
from memlog.cli.completion import complete_runs
from memlog.delivery.uploader.uploader import Uploader
from memlog.facts.later_memory import SavingCost, saving_rows
from memlog.facts.run_fold import RunStatus
from memlog.journal import RunDirectory
from memlog.ranks.registration import find_named_run, registration_of
from memlog.settings import DEFAULT_DIRECTORY

STATUS_STYLES: dict[RunStatus, str] = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "killed": "red",
}
LEVEL_STYLES = {"info": "cyan", "warning": "yellow", "error": "red"}

_CONTROLS = lazy_pattern("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_PIPE_WIDTH = 100_000
"""Columns of the output in a pipe. Programs read this output, so memlog must not wrap or cut a line."""


@contextmanager
def page() -> Iterator[Console]:
    """Yield a console for standard output. In a pipe the output is written at the end of the block."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        yield console
        return
    console.width = _PIPE_WIDTH
    with console.capture() as capture:
        yield console
    # Tables fill their last column with blanks, which programs don't need.
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


def table(
    console: Console, *headings: str, right: Collection[str] = (), folded: Collection[str] = ()
) -> Table:
    """Return an empty table without a frame, to which the caller can add more columns.

    The columns in ``right`` are aligned to the right. Long text takes several lines in the columns in
    ``folded``, and is cut in the other columns.
    """
    made = Table(box=None, pad_edge=False)
    if console.is_terminal:
        made = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            show_edge=False,
            collapse_padding=True,
            header_style="dim",
            border_style="dim",
        )
    for name in headings:
        overflow: OverflowMethod = "fold" if name in folded else "ellipsis"
        justify: JustifyMethod = "right" if name in right else "left"
        made.add_column(name, justify=justify, no_wrap=name not in folded, overflow=overflow)
    return made


def saving_table(console: Console, costs: Iterable[SavingCost]) -> Table:
    """Return a table of the memory that each way of saving a checkpoint takes in addition."""
    heading = "saving a checkpoint takes, in addition"
    made = table(console, heading, "host", "device", right=["host", "device"])
    for calls, host, device in saving_rows(costs):
        made.add_row(calls, host, device)
    return made


def plain(text: object, style: str = "") -> Text:
    """Return text without control characters, so that a journal from elsewhere can't control the terminal."""
    return Text(one_line(str(text)), style)


def notice(text: str) -> None:
    """Print a line on standard error that begins with ``memlog:``."""
    click.echo(f"memlog: {one_line(text)}", err=True)


def print_json(document: bytes) -> None:
    """Write a JSON document as UTF-8, independent of the terminal's encoding.

    Of the characters that can control a terminal, JSON's encoder escapes only those of ASCII.
    """
    text = _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", document.decode())
    click.echo(text.encode())


def sign(console: Console, symbol: str, word: str) -> str:
    """Return ``symbol``, or ``word`` if the output can't encode the symbol."""
    try:
        symbol.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return word
    return symbol


def local_time(iso: str | None) -> str:
    """Return a time from a JSON document as text, in this machine's time zone; ``"unknown"`` for ``None``."""
    if iso is None:
        return "unknown"
    # fromisoformat() accepts a "Z" only since Python 3.11.
    moment = datetime.fromisoformat(iso.replace("Z", "+00:00"))
    try:
        return moment.astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return iso  # a damaged journal may have the year 9999


run_argument = click.argument("run", metavar="RUN", shell_complete=complete_runs)
"""A run's id, its name or id in a tracker, the unique beginning of its id, its folder, or ``latest``."""

dir_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help=f"Folder that holds the runs; by default $MEMLOG_DIR, or ./{DEFAULT_DIRECTORY}.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def find_explained_run(root: Path, name: str) -> RunDirectory:
    """Return the run that a user names; see `find_named_run`.

    If its training ended badly and no helper process was left to write which rank failed first, write it now.
    Otherwise, the run would say only that its own process ended unexpectedly.
    """
    run = find_named_run(root, name)
    if registration_of(run) is not None and run.rank_failure() is None:
        end = run.end()
        if end is None or end.status != "finished":
            # Imported here: most runs train alone.
            from memlog.delivery.helper.rank_journal import publish_afterwards  # noqa: PLC0415

            publish_afterwards(run)
    return run


class DeliveryProgress(Progress):
    """Progress bar of a delivery, with bytes and points, on standard error if that is a terminal.

    A separate thread draws the bar from the uploader's current state.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader  # first, because the parent's constructor already draws
        self._before = uploader.state.delivered
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[points]:,} points"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total = sum(file.size for file in uploader.run.files())
        self.add_task(f"to {uploader.backend}", total=total, points=0)

    def get_renderables(self) -> Iterable[RenderableType]:
        points = self._uploader.state.delivered - self._before
        for task in self.task_ids:
            self.update(task, completed=self._read(), points=points)
        return super().get_renderables()

    def _read(self) -> int:
        """Return how many bytes of the journal are delivered."""
        progress = dict(self._uploader.state.files)
        return sum(
            file.bytes_before(progress[file.process].sent)
            for file in self._uploader.run.files()
            if file.process in progress
        )


class TransferMeter(Progress):
    """Progress bar of a download of several files, on standard error if that is a terminal.

    ``total`` is the number of bytes of all files; ``None``: a size is unknown.
    """

    def __init__(self, total: int | None) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.add_task("", total=total)

    def begin(self, name: str) -> None:
        self.update(self._task, description=name)

    def arrived(self, count: int) -> None:
        self.advance(self._task, count)
