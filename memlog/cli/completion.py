"""``memlog completion``: the shell's completion of commands, options, runs and backends.

Every command imports this module, and only a completion needs the journal and the backends. So the functions
import them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

import click
from click.shell_completion import CompletionItem, get_completion_class

from memlog.cli import SETTINGS

_MOST = 100
"""Maximum number of runs that are candidates. Older runs are left out."""


def complete_runs(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the ids and names of runs that begin with the typed text, the newest run first."""
    from memlog.journal import list_runs  # noqa: PLC0415 - see the module
    from memlog.journal.run_names import names_of  # noqa: PLC0415
    from memlog.journal.runs import LATEST  # noqa: PLC0415
    from memlog.settings import runs_directory  # noqa: PLC0415

    known = {LATEST: "the newest run"}
    with _silent():
        newest = reversed(list_runs(runs_directory(context.params.get("directory"))))
        for run in islice(newest, _MOST):
            with suppress(Exception):  # one bad folder must not end the completion
                names = [name for name in names_of(run) if _is_plain(name)]
                known[run.id] = names[0] if names else "run"
                for name in names:
                    known.setdefault(name, f"run {run.id}")
    return [
        CompletionItem(name, help=about)
        for name, about in known.items()
        if name.startswith(incomplete)
    ]


def complete_files_and_runs(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the candidates of `complete_runs`, and let the shell add files."""
    return [*complete_runs(context, parameter, incomplete), CompletionItem(incomplete, "file")]


def complete_files(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Let the shell complete files."""
    return [CompletionItem(incomplete, "file")]


def complete_backends(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    from memlog.sink import LOCAL, find_backends  # noqa: PLC0415 - see the module

    names = [LOCAL]
    with _silent():
        names += find_backends()
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _is_plain(name: str) -> bool:
    """Return True if no shell needs quotes around the name."""
    return name.isascii() and all(char.isalnum() or char in "._-+@=" for char in name)


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress errors and log messages, so that they do not appear in the prompt."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with suppress(Exception):
            yield
    finally:
        logging.disable(before)


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
