"""``memlog completion``: the shell's completion of commands, options, runs and backends."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from memlog.cli import SETTINGS

_VARIABLE = "_MEMLOG_COMPLETE"
"""Environment variable with which the shell asks click for candidates. It is named after the program."""


@click.command(context_settings=SETTINGS)
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script for a shell's completion.

    It completes commands, options, runs and backends in bash, zsh and fish.

    \b
    bash: add to ~/.bashrc    eval "$(memlog completion bash)"
    zsh:  add to ~/.zshrc     eval "$(memlog completion zsh)"    (after compinit)
    fish: memlog completion fish > ~/.config/fish/completions/memlog.fish
    """  # noqa: D301 - click needs the character \b itself to keep lines apart
    made = get_completion_class(shell)
    assert made is not None  # noqa: S101 - click has all three
    click.echo(made(context.find_root().command, {}, "memlog", _VARIABLE).source())
