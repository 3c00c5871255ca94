"""Root of the command line: the list of commands, and the conversion of errors to exit codes."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Any

import click

from memlog._internal.installation import is_replaced
from memlog._internal.terminal import lines, one_line, say
from memlog._version import __version__
from memlog.cli import SETTINGS
from memlog.errors import ConfigurationError, LaunchError, MemlogError

COMMANDS = {
    "advise": "advise_run",
    "compare": "compare_runs",
    "completion": "completion",
    "demo": "demo",
    "doctor": "doctor",
    "estimate": "estimate_step",
    "mcp": "serve_agents",
    "open": "open_file",
    "pull": "pull",
    "report": "report_run",
    "run": "run",
    "runs": "runs",
    "show": "show",
    "sync": "sync",
    "watch": "watch",
}
"""The function of each command, in the module of `memlog.cli` with the command's name."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""


def command_named(name: str) -> click.Command:
    """Import and return the command of a name in `COMMANDS`."""
    command: click.Command = getattr(import_module(f"memlog.cli.{name}"), COMMANDS[name])
    return command


class _Failure(click.ClickException):
    """Error that ends a command with a message on standard error and exit code 1."""

    def __init__(self, *lines: str) -> None:
        from memlog._internal.redact import without_credentials  # noqa: PLC0415 - only errors need it

        super().__init__("\n".join(one_line(without_credentials(line)) for line in lines))

    def show(self, file: Any = None) -> None:
        click.echo(f"memlog: {self.message}", file=file, err=file is None)


class _WrongUse(_Failure):
    """Error in the command's arguments, with the exit code that click uses for such an error."""

    exit_code = 2


class _Commands(click.Group):
    """Group of commands that converts their errors to exit codes.

    A command is imported when it is called, so that it does not wait for what the others need.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click passes it
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return command_named(cmd_name) if cmd_name in COMMANDS else None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # The message can repeat an argument.
            raise click.UsageError(lines(error.format_message()), error.ctx) from error
        except ConfigurationError as error:
            # The message about a wrong alert rule or a wrong gate (`--fail-if`) has three lines. The third
            # line points to the mistake, so the lines stay separate.
            raise _WrongUse(*str(error).split("\n")) from error
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
            text = str(error)
            if error.filename is not None and error.strerror is not None:
                text = f"{error.filename}: {error.strerror}"  # without the error number
            raise _Failure(text) from error


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="memlog")
def cli() -> None:
    """Record and show where the memory of your training goes, step by step."""


def main() -> None:
    """Run the command line: entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # If the terminal can't show a character, the rest of the text is still shown.
            stream.reconfigure(errors="replace")
    if is_replaced():
        say(
            "another distribution has replaced memlog's own module `memlog`: `memlog doctor` names it, and "
            "the remedy"
        )
    cli(prog_name="memlog")
