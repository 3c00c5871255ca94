"""``memlog run``: records a training script that was never touched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import click

from memlog._internal.launch_options import Launch
from memlog.alerts import parse_rule
from memlog.cli.options import SETTINGS, dir_option
from memlog.errors import ConfigurationError, UnwritableDirectoryError
from memlog.launch.command import environment, execute
from memlog.settings import Settings, enabled_by_environment, resolve
from memlog.sink import LOCAL, load_backend


# What follows the command's name is the command's, also where it looks like an option of memlog's.
@click.command(context_settings={**SETTINGS, "allow_interspersed_args": False})
@click.option(
    "--backend",
    "backends",
    metavar="BACKEND",
    multiple=True,
    help="Where the memory is recorded: mlflow, wandb, local (memlog's own files only) or what another "
    "package provides; may be repeated. "
    "Without it the run that the script opens is joined.",
)
@click.option(
    "--alert",
    "alerts",
    metavar="RULE",
    multiple=True,
    help='Such as "host.rss > 80%" or "device.allocated > 30 GiB"; may be repeated.',
)
@click.option("--project", help="The tracker's project for a run that memlog opens.")
@click.option("--name", help="That run's name.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    help="Record at every so many steps.",
)
@click.option(
    "--layers",
    is_flag=True,
    help="Trace a step now and then, layer by layer: whose memory it is.",
)
@click.option(
    "--budget",
    type=float,
    metavar="SHARE",
    help="Share of training time that --layers may cost, 0 to 1 (default 0.01).",
)
@dir_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(directory: Path | None, command: tuple[str, ...], **given: Any) -> NoReturn:
    """Runs COMMAND and records the memory of whatever trains in it.

    \b
    memlog run --backend mlflow -- python train.py --epochs 3
    memlog run -- torchrun --nproc-per-node 2 train.py
    memlog run --layers -- python train.py
    memlog run -- bash job.sh

    Each Python process that steps a PyTorch optimizer has a run of its own; all others are left alone.
    What the script itself says to memlog.init goes before the options here.
    """  # noqa: D301 - click's mark for lines that stay apart is the character itself
    if given["budget"] is not None and not given["layers"]:
        raise ConfigurationError("--budget says what tracing layers may cost: pass --layers, too")
    settings = resolve(
        {
            **given,
            "backends": _split(given["backends"]) or None,
            "alerts": given["alerts"] or None,
            "layers": given["layers"] or None,
            "directory": None if directory is None else str(directory),
        }
    )
    _check(settings)
    if not enabled_by_environment():
        execute(command, os.environ)
    execute(command, environment(_launch(settings), os.environ))


def _split(backends: Iterable[str]) -> tuple[str, ...]:
    """``--backend wandb,mlflow`` names two, as ``$MEMLOG_BACKEND`` does."""
    names = (name.strip() for given in backends for name in given.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


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
    )


def _changed(directory: str) -> int | None:
    try:
        return Path(directory).stat().st_mtime_ns
    except OSError:
        return None


def _check(settings: Settings) -> None:
    """Finds what would go wrong at the first step while somebody looks."""
    for text in settings.alerts:
        _check_rule(text)
    for name in settings.backends:
        if name != LOCAL:
            load_backend(name)
    _check_directory(Path(settings.directory))


def _check_rule(text: str) -> None:
    try:
        parse_rule(text)
    except ConfigurationError as error:
        # Its message points at the place below the rule; a command has one line for it.
        said, _, shown = str(error).partition("\n")
        place = shown.rpartition("\n")[2].find("^") - 1
        raise ConfigurationError(f"{said} (in {text!r}, at character {place})") from error


def _check_directory(directory: Path) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        # Tried rather than asked: in /proc everything may be written, says the system, and nothing can.
        with tempfile.TemporaryDirectory(prefix=".memlog-", dir=existing):
            pass
    except OSError as error:
        raise UnwritableDirectoryError(
            f"can't make a folder for the run in {directory}: {existing} is no folder that can be written; "
            "pass --dir or set MEMLOG_DIR"
        ) from error
