"""Origin of a run: the trainer's command, and the commit of the code in its working directory."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import shell_line
from memlog.events import Event, Origin, now_us

_GIT_TIMEOUT = 10.0
"""Maximum seconds for one git command: the repository may be on a slow file system."""
_END_WAIT = 1.0
"""Maximum seconds that the end of a short run waits for git."""
_LONGEST = 2000
"""Maximum characters of a command. A longer command is cut off."""


def read_origin(trainer: int, folder: Path) -> Origin:
    """Return where a run came from. ``folder`` is the trainer's working directory when the run began."""
    within, commit = _repository(folder)
    return msgspec.structs.replace(
        command_and_host(trainer),
        git_commit=commit,
        git_uncommitted_changes=None if commit is None else _is_changed(folder),
        working_directory=within,
    )


def command_and_host(trainer: int) -> Origin:
    """Return where a run came from, without the commit, whose search can take long."""
    return Origin(
        time_us=now_us(),
        command=_command(trainer),
        python=platform.python_version(),
        host=platform.node(),
        git_commit=None,
        git_uncommitted_changes=None,
        working_directory=None,
    )


def _command(trainer: int) -> str | None:
    with suppress(psutil.Error):
        arguments = psutil.Process(trainer).cmdline()
        while arguments and not arguments[-1]:
            arguments.pop()  # a process that sets its title, as Ray's workers do, leaves empty arguments
        line = shell_line(arguments)
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
    return None


def _repository(folder: Path) -> tuple[str | None, str | None]:
    """Return a folder's path within its git repository, and the commit; two ``None`` outside repositories."""
    output = _git(folder, "rev-parse", "--show-prefix", "HEAD")
    if output is None:
        return None, None
    # The prefix may contain line breaks; the commit does not.
    prefix, _, commit = output.removesuffix("\n").rpartition("\n")
    return prefix.rstrip("/") or ".", commit


def _is_changed(folder: Path) -> bool | None:
    # Not `git diff`, which may write the index.
    output = _git(
        folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty"
    )
    return None if output is None else output != ""


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; ``None`` if git fails or is too slow.

    Git takes no optional lock, starts no file-system monitor, and asks the user nothing.
    """
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(  # noqa: S603 - constants
            ["git", "-c", "core.fsmonitor=false", *arguments],  # noqa: S607 - the user's own git
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_TIMEOUT,
            check=True,
        ).stdout
    return None


class OriginReader:
    """Reader of a run's origin. It reads on its own thread, because git may be slow. It never raises errors.

    `look` calls ``publish`` on its caller's thread.
    """

    def __init__(
        self, trainer: int, publish: Callable[[Event], object], diagnostics: Diagnostics
    ) -> None:
        self._trainer = trainer
        self._publish = publish
        self._diagnostics = diagnostics
        self._found: Origin | None = None
        self._is_published = False
        self._thread = threading.Thread(target=self._read, name="memlog-origin", daemon=True)

    def start(self) -> None:
        with self._diagnostics.contained("reading where the run came from"):
            self._thread.start()

    def _read(self) -> None:
        with self._diagnostics.contained("reading where the run came from"):
            self._found = read_origin(self._trainer, Path.cwd())

    def look(self) -> None:
        """Publish the origin if it is known and was not published before."""
        if self._found is not None and not self._is_published:
            self._is_published = True
            self._publish(self._found)

    def begin_another_run(self) -> None:
        """Let `look` publish the origin again. Call it when the user opens another run."""
        self._is_published = False

    def finish(self, wait: float = _END_WAIT) -> None:
        """Wait at most ``wait`` seconds for git, and publish the origin."""
        if self._thread.is_alive():
            self._thread.join(wait)
        self.look()
