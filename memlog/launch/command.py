"""Replace this process by the command to record."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from memlog._internal.current_session import VARIABLE, Launch
from memlog.errors import LaunchError

SITE = Path(__file__).with_name("site")
"""The folder that goes first on ``PYTHONPATH``."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""A shell's exit codes for a command that is not found, and for one that can't be executed."""


def environment(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the command's environment: the inherited one with two variables changed."""
    paths = [
        path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path != str(SITE)
    ]
    # An empty PYTHONPATH adds no folder. An empty entry in a longer PYTHONPATH adds the working directory.
    behind = os.pathsep.join(paths)
    path = f"{SITE}{os.pathsep}{behind}" if behind else str(SITE)
    return {**inherited, "PYTHONPATH": path, VARIABLE: launch.encode()}


def execute(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, so that output, exit code and signals are the command's own.

    Raises:
        LaunchError: the command can't be run.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Python ignores these two signals, and the command would inherit that.
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ignored}
    try:
        os.execvpe(command[0], list(command), environ)  # noqa: S606 - it is the user's own command
    except OSError as error:
        raise _refused(command[0], error) from error
    except ValueError as error:  # the name is empty, for example an unset "$PYTHON"
        raise LaunchError(f"{command[0]!r} can't be run: {error}", _NOT_FOUND) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refused(program: str, error: OSError) -> LaunchError:
    if error.errno == errno.ENOEXEC:
        text = (
            f"{program} has no '#!' line: name its interpreter, as in memlog run -- bash {program}"
        )
        return LaunchError(text, _NOT_EXECUTABLE)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        text = f"{program}: command not found: name a program that is on PATH, or its whole path"
        return LaunchError(text, _NOT_FOUND)
    if Path(program).is_dir():
        return LaunchError(f"{program} is a folder: name a program", _NOT_EXECUTABLE)
    return LaunchError(
        f"{program}: {error.strerror}: make it executable, or name its interpreter, as in "
        f"memlog run -- python {program}",
        _NOT_EXECUTABLE,
    )
