"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path

import click

from memlog.cli.completing import complete_runs
from memlog.settings import DEFAULT_DIRECTORY

run_argument = click.argument("run", metavar="RUN", shell_complete=complete_runs)
"""A run's id, its name or id in a tracker, the unique beginning of its id, or ``latest``."""

dir_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help=f"Folder that holds the runs; by default $MEMLOG_DIR, or ./{DEFAULT_DIRECTORY}.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
