"""``memlog demo``: training of a small GPT for a minute or two, recorded by memlog."""

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
    help="Number of optimizer steps; by default as many as two CPU cores make in a minute or two.",
)
@click.option(
    "--backend",
    default="mlflow",
    show_default=True,
    shell_complete=complete_backends,
    help="Where the memory is recorded: mlflow, wandb (offline), local (memlog's own files only), …",
)
def demo(steps: int | None, backend: str) -> None:
    """Train a small GPT and record its memory, as an example run.

    The program is examples/train_gpt.py, an ordinary PyTorch program in one file.
    """
    if not is_installed("torch"):
        raise MissingExtraError(
            "the demo trains with PyTorch, which is not installed: pip install torch"
        )
    _require_client(backend)
    arguments = ["--backend", backend]
    if steps is not None:
        arguments += ["--steps", str(steps)]
    # Beside this file if memlog is installed, in examples/ in a checkout.
    program = Path(__file__).with_name("train_gpt.py")
    if not program.exists():
        program = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    _run_program(program, arguments)


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
