"""``memlog run``: recording of a training script without changes to it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import click

from memlog._internal.current_session import Launch
from memlog.alerts import parse_rules
from memlog.cli import SETTINGS
from memlog.cli.completion import complete_backends, complete_files
from memlog.cli.output import dir_option
from memlog.errors import ConfigurationError, UnwritableDirectoryError
from memlog.launch.command import environment, execute
from memlog.settings import WEBHOOK, Settings, enabled_by_environment, resolve
from memlog.sink import LOCAL, load_backend


# Arguments after the command's name belong to the command, even if they look like memlog's options.
@click.command(context_settings={**SETTINGS, "allow_interspersed_args": False})
@click.option(
    "--backend",
    "backends",
    metavar="BACKEND",
    multiple=True,
    shell_complete=complete_backends,
    help="Tracker for the memory: mlflow, wandb, local (memlog's own files only) or one that another "
    "package provides; may be repeated. "
    "Without it memlog joins the run that the script opens.",
)
@click.option(
    "--alert",
    "alerts",
    metavar="RULE",
    multiple=True,
    help='Alert rule, such as "host.rss > 80%" or "device.allocated > 30 GiB"; may be repeated.',
)
@click.option(
    "--alert-webhook",
    metavar="ADDRESS",
    help="Post each alert to this address as JSON, or in Slack's form. Better: set MEMLOG_ALERT_WEBHOOK, "
    "because other users can see the arguments of a process.",
)
@click.option("--project", help="The tracker's project for a run that memlog opens.")
@click.option("--name", help="That run's name.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    help="Steps between two recordings (default 1).",
)
@click.option(
    "--layers",
    is_flag=True,
    help="Trace a step now and then to show the memory of each layer.",
)
@click.option(
    "--budget",
    type=float,
    metavar="SHARE",
    help="Share of training time that --layers may cost, 0 to 1 (default 0.01).",
)
@click.option(
    "--quiet",
    is_flag=True,
    help="Print no line about a run that ended without a finding.",
)
@dir_option
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    shell_complete=complete_files,
)
def run(directory: Path | None, command: tuple[str, ...], **given: Any) -> NoReturn:
    """Run COMMAND and record the memory of its training.

    \b
    memlog run --backend mlflow -- python train.py --epochs 3
    memlog run -- torchrun --nproc-per-node 2 train.py
    memlog run --layers -- python train.py
    memlog run -- bash job.sh

    Each Python process that steps a PyTorch optimizer gets its own run; other processes are not
    recorded. Arguments of memlog.init in the script take precedence over the options here.
    """  # noqa: D301 - click needs the character \b itself to keep lines apart
    if given["budget"] is not None and not given["layers"]:
        raise ConfigurationError("--budget limits the cost of tracing layers: pass --layers, too")
    names = (name.strip() for name in ",".join(given["backends"]).split(","))
    settings = resolve(
        {
            **given,
            "backends": tuple(filter(None, names)) or None,
            "alerts": given["alerts"] or None,
            "layers": given["layers"] or None,
            "quiet": given["quiet"] or None,
            "directory": None if directory is None else str(directory),
        }
    )
    _check(settings)
    if not enabled_by_environment():
        execute(command, os.environ)
    # In the environment, because the launch's options may be shown.
    webhook = {WEBHOOK: given["alert_webhook"]} if given["alert_webhook"] else {}
    execute(command, {**environment(_launch(settings), os.environ), **webhook})


def _launch(settings: Settings) -> Launch:
    return Launch(
        pid=os.getpid(),
        directory=settings.directory,
        changed=_changed(settings.directory),
        backends=settings.backends,
        alerts=settings.alerts,
        project=settings.project,
        name=settings.name,
        every=settings.every,
        layers=settings.layers,
        budget=settings.budget,
        quiet=settings.quiet is True,
    )


def _changed(directory: str) -> int | None:
    try:
        return Path(directory).stat().st_mtime_ns
    except OSError:
        return None


def _check(settings: Settings) -> None:
    """Raise an error if the rules, the trackers or the runs' folder can't be used."""
    parse_rules(settings.alerts)
    for name in settings.backends:
        if name != LOCAL:
            load_backend(name)
    directory = Path(settings.directory)
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        # os.access() is not enough: it reports /proc as writable, although nothing can be created there.
        with tempfile.TemporaryDirectory(prefix=".memlog-", dir=existing):
            pass
    except OSError as error:
        raise UnwritableDirectoryError(
            f"can't create a folder for the run in {directory}: {existing} is not a writable folder; "
            "pass --dir or set MEMLOG_DIR"
        ) from error
