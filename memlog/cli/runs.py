"""``memlog runs``: list of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from memlog._internal.terminal import format_bytes
from memlog.cli import SETTINGS
from memlog.cli.output import (
    STATUS_STYLES,
    dir_option,
    json_option,
    local_time,
    notice,
    page,
    plain,
    print_json,
    sign,
    table,
)
from memlog.events import ALLOCATED, HOST_RSS
from memlog.facts.run_fold import RunStatus
from memlog.journal import RunDirectory, find_run, list_runs
from memlog.journal.runs import LATEST
from memlog.reports import Summary, encode, summarize
from memlog.reports.schema import SCHEMA, Delivery, IsoTime
from memlog.settings import LONGEST_NAME, runs_directory
from memlog.sink import WEBHOOK

_ROOMY = 110
"""If a terminal has at least this many characters in a line, the table's column of names is wide. In a
narrower terminal, this column is narrow."""


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the document of ``memlog runs --json``, with the field names of ``memlog show --json``."""

    id: str
    """memlog's id of the run."""
    name: str | None
    """The ``name`` that was passed to ``init``."""
    project: str | None
    """The ``project`` that was passed to ``init``."""
    directory: str
    """The run's folder."""
    status: RunStatus
    """State of the run."""
    begun: IsoTime | None
    """Time of the beginning."""
    steps: int
    """Number of recorded steps."""
    host_peak_bytes: int | None
    """Peak of the training process's resident set."""
    device_peak_bytes: int | None
    """Largest peak of allocated bytes among the run's devices; ``None`` if it used none."""
    delivered: dict[str, Delivery]
    """State of delivery by tracker."""


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """Document of ``memlog runs --json``, the oldest run first."""

    schema: int = SCHEMA
    """Version of this document."""
    runs: list[RunLine]
    """The runs, the oldest first."""


@click.command(context_settings=SETTINGS)
@json_option
@dir_option
def runs(directory: Path | None, as_json: bool) -> None:
    """List the runs, the newest last."""
    root = runs_directory(directory)
    all_runs = list_runs(root)
    lines = run_lines(all_runs)
    if as_json:
        print_json(encode(RunList(runs=lines)))
        return
    if not all_runs:
        find_run(root, LATEST)  # raises, with the remedy
    with page() as console:
        console.print(_table(console, lines))
        for problem in _problems(lines):
            console.print(plain(problem))


def run_lines(found: Iterable[RunDirectory]) -> list[RunLine]:
    """Return a line for each run. A run that can't be read is left out with a warning."""
    lines = []
    for run in found:
        try:
            lines.append(_line(run))
        except Exception as error:  # noqa: BLE001, PERF203 - a folder may hold anything
            notice(f"{run.path} is left out, because it can't be read: {error}")
    return lines


def _problems(lines: Iterable[RunLine]) -> Iterator[str]:
    """Yield a line for each problem of a delivery. These lines are too long for the table."""
    for line in lines:
        for backend, delivery in line.delivered.items():
            if delivery.problem:
                sync = RunDirectory(Path(line.directory)).command("sync")
                named = f"memlog sync {line.id}" in delivery.problem
                remedy = (
                    "" if named or line.status == "running" else f"; `{sync}` delivers the rest"
                )
                yield f"{line.id}: {backend}: {delivery.problem}{remedy}"


def _line(run: RunDirectory) -> RunLine:
    summary = summarize(run, remember=True)
    return RunLine(
        id=summary.run.id,
        name=summary.run.name,
        project=summary.run.project,
        directory=summary.run.directory,
        status=summary.status,
        begun=summary.run.begun,
        steps=summary.steps,
        host_peak_bytes=summary.peaks[HOST_RSS].bytes,
        device_peak_bytes=_device_peak(summary),
        delivered=summary.health.delivered,
    )


def _device_peak(summary: Summary) -> int | None:
    sizes = [
        peak.bytes
        for kind, peak in summary.peaks.items()
        if kind.endswith(ALLOCATED) and peak.bytes is not None
    ]
    return max(sizes, default=None)


def _table(console: Console, lines: Sequence[RunLine]) -> Table:
    made = table(console)
    peak = "\npeak" if console.is_terminal else " peak"
    made.add_column("id", no_wrap=True)
    made.add_column("name", no_wrap=True, max_width=_name_width(console))
    made.add_column("status", no_wrap=True)
    made.add_column("begun", min_width=len("2026-09-21"))
    for heading in ("steps", f"host{peak}", f"device{peak}"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("delivered", min_width=len("delivered"), overflow="fold")
    for line in lines:
        made.add_row(
            plain(line.id, "bold"),
            plain(_name(line)),
            plain(line.status, STATUS_STYLES[line.status]),
            local_time(line.begun),
            f"{line.steps:,}",
            _size(line.host_peak_bytes),
            _size(line.device_peak_bytes),
            plain(", ".join(_states(console, line)) or "-"),
        )
    return made


def _name(line: RunLine) -> str:
    """Return the name passed to ``init``. If there is none, return the names of the runs in trackers."""
    joined = dict.fromkeys(
        run.name for delivery in line.delivered.values() for run in delivery.runs if run.name
    )
    return line.name or ", ".join(joined) or "-"


def _name_width(console: Console) -> int:
    """Return the width of the column of names, limited so that a long name leaves room for the figures."""
    if not console.is_terminal:
        return LONGEST_NAME  # `init` refuses longer names, so no name is cut
    return 10 if console.width < _ROOMY else 24


def _size(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def _states(console: Console, line: RunLine) -> Iterator[str]:
    for backend, delivery in line.delivered.items():
        if backend == WEBHOOK:  # it gets alerts only
            yield f"{backend} {delivery.stage}"
        elif delivery.stage == "done":
            yield f"{backend} {delivery.points:,} {sign(console, '✓', 'done')}"
        elif delivery.stage == "delivering":
            yield f"{backend} {delivery.points:,} {sign(console, '…', 'so far')}"
        elif delivery.points:
            yield f"{backend} {delivery.points:,}, rest waiting"
        else:
            yield f"{backend} all waiting"
