"""The command line's root: the commands, and what an error turns into."""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from memlog._internal.redact import without_credentials
from memlog._version import __version__
from memlog.cli.advise import advise_run
from memlog.cli.compare import compare_runs
from memlog.cli.demo import demo
from memlog.cli.open import open_file
from memlog.cli.options import SETTINGS
from memlog.cli.output import one_line
from memlog.cli.pull import pull
from memlog.cli.run import run
from memlog.cli.runs import runs
from memlog.cli.show import show
from memlog.cli.sync import sync
from memlog.errors import ConfigurationError, LaunchError, MemlogError

INTERRUPTED = 130
"""As a shell has it for a program that Ctrl-C ended."""


class _Failure(click.ClickException):
    """One line on standard error, and an exit code."""

    exit_code = 1

    def __init__(self, text: str) -> None:
        super().__init__(self._shown(without_credentials(text)))

    @staticmethod
    def _shown(text: str) -> str:
        return one_line(text)

    def show(self, file: Any = None) -> None:
        """Prints the line as memlog prints all its messages."""
        click.echo(f"memlog: {self.message}", file=file, err=file is None)


class _WrongUse(_Failure):
    """What was asked for can't be right: click's own exit code for that.

    A wrong rule's or gate's message has more lines than one: they show the place.
    """

    exit_code = 2

    @staticmethod
    def _shown(text: str) -> str:
        return "\n".join(one_line(line) for line in text.split("\n"))


class _Commands(click.Group):
    """The group that turns errors into exit codes; no command does so itself."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            raise _WrongUse(str(error)) from error
        except LaunchError as error:
            _Failure(str(error)).show()
            ctx.exit(error.exit_code)
        except MemlogError as error:
            raise _Failure(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _Failure(_of_the_system(error)) from error


def _of_the_system(error: OSError) -> str:
    """An error that names a file, without its number."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="memlog")
def cli() -> None:
    """Where the memory of your training goes, step by step."""


for _command in (advise_run, compare_runs, demo, open_file, pull, run, runs, show, sync):
    cli.add_command(_command)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that can't show a character in a run's journal still shows the rest.
            stream.reconfigure(errors="replace")
    cli(prog_name="memlog")
