"""``memlog demo``: a program with a memory fault, recorded by memlog: a small GPT, or one without PyTorch."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click

from memlog.cli import SETTINGS
from memlog.cli.completion import complete_backends
from memlog.errors import MissingExtraError
from memlog.session.session import finish
from memlog.sink import LOCAL, is_installed, load_backend


@click.command(context_settings=SETTINGS)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Number of steps; by default as many as two CPU cores make in about a minute.",
)
@click.option(
    "--tiny",
    is_flag=True,
    help="Count words for a few seconds instead: without PyTorch and a tracker.",
)
@click.option(
    "--backend",
    show_default="mlflow",
    shell_complete=complete_backends,
    help="Where the memory is recorded: mlflow, wandb (offline), local (memlog's own files only), …",
)
def demo(steps: int | None, backend: str | None, *, tiny: bool) -> None:
    """Train a small GPT and record its memory, as an example run.

    The program is examples/train_gpt.py, an ordinary PyTorch program in one file; with --tiny,
    examples/count_words.py.
    """
    arguments = [] if steps is None else ["--steps", str(steps)]
    if tiny:
        if backend not in (None, LOCAL):
            raise click.UsageError("--tiny uses no tracker: leave out --backend, or --tiny")
        _run_program(_example("count_words.py"), arguments)
        return
    if not is_installed("torch"):
        raise MissingExtraError(
            "the demo trains with PyTorch, which is not installed: pip install torch, or do without: "
            "memlog demo --tiny"
        )
    backend = backend or "mlflow"
    _require_client(backend)
    _run_program(_example("train_gpt.py"), ["--backend", backend, *arguments])


def _example(name: str) -> Path:
    """Return the path of an example: beside this file if memlog is installed, else in the checkout."""
    program = Path(__file__).with_name(name)
    return program if program.exists() else Path(__file__).parents[2] / "examples" / name


def _require_client(backend: str) -> None:
    if backend == LOCAL:
        return
    try:
        load_backend(backend)
    except MissingExtraError as error:
        raise MissingExtraError(f"{error}, or do without: memlog demo --backend local") from error


def _run_program(path: Path, arguments: list[str]) -> None:
    """Run a Python program in this process, as ``python path arguments…`` would."""
    before = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except KeyboardInterrupt:
        finish("killed")  # main() catches Ctrl-C, and the run would end as finished without this
        raise
    finally:
        sys.argv = before
