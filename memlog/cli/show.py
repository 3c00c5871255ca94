"""``memlog show``: summary of one run on one page."""

from __future__ import annotations

from pathlib import Path

import click

from memlog.cli import SETTINGS
from memlog.cli.explained_run import find_explained_run
from memlog.cli.options import dir_option, json_option, run_argument
from memlog.cli.output import page, print_json
from memlog.cli.short_page import print_short
from memlog.cli.summary_page import print_everything
from memlog.reports import encode, summarize
from memlog.settings import runs_directory


@click.command(context_settings=SETTINGS)
@run_argument
@click.option("--all", "everything", is_flag=True, help="Show all metrics, alerts and files, too.")
@json_option
@dir_option
def show(run: str, directory: Path | None, everything: bool, as_json: bool) -> None:
    """Show one run: its memory, and the delivery of its points.

    RUN is a run's id or the id's beginning, its name in a tracker, or "latest". docs/show-json.md explains
    every field of the JSON document.
    """
    found = find_explained_run(runs_directory(directory), run)
    summary = summarize(found)
    if as_json:
        print_json(encode(summary))
        return
    with page() as console:
        (print_everything if everything else print_short)(console, summary)
