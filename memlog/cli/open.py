"""``memlog open``: display of a flame graph or a snapshot in the browser, without any other server."""

from __future__ import annotations

import os
import platform
import sys
import webbrowser
from pathlib import Path

import click

from memlog._internal.terminal import one_line
from memlog.artifacts.pulling import kept
from memlog.artifacts.server import LOOPBACK, Page, PageServer, is_openable, page_of
from memlog.cli import SETTINGS
from memlog.cli.completion import complete_files_and_runs
from memlog.cli.output import dir_option, notice
from memlog.errors import ConfigurationError, RunNotFoundError, UnopenableFileError
from memlog.journal import RunDirectory
from memlog.journal.artifacts import artifact_path
from memlog.ranks.registration import find_named_run
from memlog.settings import runs_directory


@click.command(
    "open",
    context_settings=SETTINGS,
    short_help="Show a flame graph or a snapshot in the browser.",
)
@click.argument("what", metavar="FILE|RUN", shell_complete=complete_files_and_runs)
@click.option(
    "--no-browser", "browser", flag_value=False, default=True, help="Only print the address."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the page on this machine; by default a free port.",
)
@dir_option
def open_file(what: str, browser: bool, port: int, directory: Path | None) -> None:
    """Show a flame graph in the browser until Ctrl-C.

    A snapshot of CUDA's allocator is shown as a flame graph, too.

    The file is recognised by its content, not by its name. It is served on this machine for this machine
    only: nothing leaves the machine. For a run (its id or the beginning of it, its name in a tracker, or
    "latest") the newest flame graph is shown.
    """
    path = _find(what, directory)
    page = page_of(path, announce=notice)
    for note in page.notes:
        notice(f"{path}: {note}")
    _show(page, path, port, browser=browser)


def _find(what: str, directory: Path | None) -> Path:
    path = Path(what)
    if path.exists():
        return path
    try:
        run = find_named_run(runs_directory(directory), what)
    except RunNotFoundError as error:
        raise RunNotFoundError(f"there is no file {what!r}, and no run: {error}") from error
    return _newest(run)


def _newest(run: RunDirectory) -> Path:
    """Return the run's newest flame graph; if there is none, the newest file that can be shown."""
    events = [event for event in kept(run)[::-1] if not event.is_report]
    # The sort is stable: among the flame graphs the newest stays first.
    events.sort(key=lambda event: event.kind != "flamegraph")
    for event in events:
        path = artifact_path(run, event)
        if path is not None and is_openable(path):
            return path
    if not events:
        from memlog.reports import summarize  # noqa: PLC0415 - only for a run without files

        if (waits := summarize(run).traced.untraced) is not None:
            raise UnopenableFileError(
                f"run {run.id} has no flame graph, because no step was traced: {waits}"
            )
        raise UnopenableFileError(
            f"run {run.id} has no flame graph: no step of it was traced; train with memlog.init(model=model, "
            f"layers=True), or with `memlog run --layers`; `{run.command('report')}` writes the run's report"
        )
    raise UnopenableFileError(
        f"run {run.id} has no file that can be shown: its {len(events):,} files were deleted here, or are "
        f"of other kinds; `{run.command('show')}` lists them, `{run.command('pull')} --backend B -o DIR` "
        "fetches them from a tracker"
    )


def _show(page: Page, path: Path, port: int, *, browser: bool) -> None:
    try:
        server = PageServer(page, port)
    except OSError as error:
        raise ConfigurationError(
            f"can't serve on port {port} ({error.strerror}): choose another with --port"
        ) from error
    try:
        with server:
            _serve(server, path, browser=browser)
    except KeyboardInterrupt:  # the normal end of this command
        click.echo("\nmemlog: no longer shown")


def _serve(server: PageServer, path: Path, *, browser: bool) -> None:
    click.echo(one_line(f"{path.name} is shown at"))
    click.echo(f"  {server.url}")
    if browser and not _has_screen():
        port = server.server_port
        forward = f"ssh -N -L {port}:{LOOPBACK}:{port} {platform.node() or 'HOST'}"
        click.echo(f"no screen here; first run this on the machine in front of you:\n  {forward}")
    elif browser:
        webbrowser.open(server.url)
    click.echo("for this machine only; Ctrl-C ends it")
    sys.stdout.flush()
    server.serve_forever()


def _has_screen() -> bool:
    """Return True if a browser can open a window. A text browser would take over the terminal."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
