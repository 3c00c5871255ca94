"""``memlog report``: a run's report as one HTML file, or a comparison of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from memlog._internal.terminal import format_bytes, one_line
from memlog.cli import SETTINGS
from memlog.cli.completion import complete_runs
from memlog.cli.output import dir_option, find_explained_run, notice
from memlog.errors import ConfigurationError
from memlog.reports.page import comparison_html, html
from memlog.settings import runs_directory


@click.command(
    "report", context_settings=SETTINGS, short_help="Write a run's report as a web page."
)
@click.argument(
    "runs", metavar="RUN [RUN_B]", nargs=-1, required=True, shell_complete=complete_runs
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    default=Path("report.html"),
    show_default=True,
    help="File to write; an older one is replaced.",
)
@dir_option
def report_run(runs: Sequence[str], output: Path, directory: Path | None) -> None:
    """Write a run's report: one HTML file that opens with a double click, without a network.

    It begins with the verdict and what to do; then memory over the steps, what it is made of, which layers
    hold it and what would help. With two runs it compares the second with the first. A RUN is a run's id or
    its beginning, its name in a tracker, or "latest".
    """
    if len(runs) > 2:  # noqa: PLR2004 - a page compares two
        raise ConfigurationError(
            "name one run, or two to compare: `memlog compare` takes more than two"
        )
    root = runs_directory(directory)
    named_runs = [find_explained_run(root, name) for name in runs]
    if len(named_runs) == 1:
        page = html(named_runs[0], announce=notice)
    else:
        page = comparison_html(named_runs[0], named_runs[1], announce=notice)
    content = page.encode()
    output.write_bytes(content)
    shown = output.absolute().as_uri()
    click.echo(one_line(f"wrote {output} ({format_bytes(len(content))}): open {shown}"))
