"""``%load_ext memlog``: memlog's commands and sessions in a notebook's cells."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.display import display

from memlog.errors import MemlogError
from memlog.journal.runs import LATEST
from memlog.session.exit import status_of
from memlog.session.phases import phase
from memlog.session.session import current_session, init

_OF_A_RUN = ("show", "advise")
"""Commands that get the running session's run, or the latest, if no run follows their name."""


class _CellArguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%memlog: {message}; {self.format_usage().strip()}")


def _cell_arguments() -> _CellArguments:
    parser = _CellArguments(prog="%%memlog", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "backend", nargs="*", help="trackers, or local; default: the run that you open"
    )
    parser.add_argument("--name", help="name of the run")
    parser.add_argument("--project", help="experiment or project in the tracker")
    parser.add_argument("--alert", action="append", default=[], metavar="RULE", help="alert rule")
    parser.add_argument("--layers", action="store_true", help="trace steps, layer by layer")
    parser.add_argument("--dir", help="folder for runs")
    return parser


class NotebookMagics:
    """The line magic ``%memlog COMMAND …`` and the cell magic ``%%memlog [BACKEND …] [--layers] …``."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def line(self, line: str) -> None:
        """Run a command of memlog's in this environment, as ``!memlog`` would in the shell's.

        ``%memlog show`` and ``%memlog advise`` need no name of a run: they take the running session's, else
        the latest. The exit code is in ``_exit_code``, as for ``!``.
        """
        command = [sys.executable, "-m", "memlog", *_with_run(shlex.split(line) or ["show"])]
        with subprocess.Popen(  # noqa: S603 - the user's own words, without a shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                for text in process.stdout or ():
                    sys.stdout.write(text)
            except KeyboardInterrupt:
                # Some front ends signal the kernel alone.
                process.send_signal(signal.SIGINT)
        self._shell.user_ns["_exit_code"] = process.returncode

    def cell(self, line: str, cell: str) -> None:
        """Record the cell as a run, and show the run's report below it.

        If a session records already, the cell is a phase of its run instead.
        """
        __tracebackhide__ = True  # IPython's traceback begins in the cell
        given = _cell_arguments().parse_args(shlex.split(line))
        if current_session() is not None:
            if line.strip():
                raise UsageError(
                    "%%memlog takes no arguments while a session records: memlog.finish() ends it"
                )
            # Since IPython 9, the count of executions is that of the next cell already.
            number = len(self._shell.history_manager.input_hist_parsed) - 1
            with phase(f"In[{number}]"):
                failure = self._run(cell)
                if failure is not None:
                    raise failure
            return
        try:
            session = init(
                given.backend or None,
                name=given.name,
                project=given.project,
                alerts=given.alert,
                layers=given.layers,
                dir=given.dir,
            )
        except MemlogError as error:
            raise UsageError(f"%%memlog: {error}") from error
        failure = self._run(cell)
        session.finish(status_of(failure))
        display(session)  # type: ignore[no-untyped-call]
        if failure is not None:
            raise failure

    def _run(self, code: str) -> BaseException | None:
        """Run a cell's code, and return the exception that it raised or that its syntax has.

        The notebook shows the exception once and stops at this cell, as it does without memlog, because
        `cell` raises it again.
        """
        shell = self._shell
        shell._showtraceback = lambda *_: None  # noqa: SLF001 - IPython's place to show it elsewhere
        try:
            result = shell.run_cell(code)
        finally:
            del shell._showtraceback  # noqa: SLF001
        return result.error_in_exec or result.error_before_exec  # type: ignore[no-any-return]


def _with_run(words: list[str]) -> list[str]:
    """Return a command's words with a run, if the command needs one and none follows its name."""
    name, *rest = words
    if name not in _OF_A_RUN or (rest and not rest[0].startswith("-")):
        return words
    session = current_session()
    if session is None or session.directory is None or "--dir" in rest:
        return [name, LATEST, *rest]
    return [name, session.directory.name, *rest, "--dir", str(session.directory.parent)]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; IPython calls this for ``%load_ext memlog``."""
    magics = NotebookMagics(shell)
    shell.register_magic_function(magics.line, magic_kind="line", magic_name="memlog")
    shell.register_magic_function(magics.cell, magic_kind="cell", magic_name="memlog")
