"""Programs that tests start: training scripts of a user's, each in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

from memlog.journal import RunDirectory


def start(
    script: str, directory: Path, *arguments: str, stdin: int | None = None, **environment: str
) -> "subprocess.Popen[str]":
    """Starts a Python script in ``directory``, which becomes its working directory."""
    path = directory / "train.py"
    path.write_text(textwrap.dedent(script))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "MEMLOG_"))}
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        cwd=directory,
        env={**clean, **environment},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    script: str, directory: Path, *arguments: str, timeout: float = 240, **environment: str
) -> str:
    """Runs a Python script to its end and returns what it printed; fails where it fails."""
    process = start(script, directory, *arguments, **environment)
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return output


COMMANDS = """
    import json
    import sys

    from memlog.cli.main import main

    for arguments in json.loads(sys.argv[1]):
        sys.argv = ["memlog", *arguments]
        try:
            main()
        except SystemExit as end:
            assert not end.code, arguments
"""


def commands(*arguments: tuple[str, ...], directory: Path, **environment: str) -> str:
    """Runs memlog's commands one after the other in one process, which imports the clients once."""
    return run(COMMANDS, directory, json.dumps(arguments), **environment)


def start_memlog(*arguments: str, directory: Path, **environment: str) -> "subprocess.Popen[str]":
    """Starts memlog's command line in ``directory``."""
    return subprocess.Popen(
        [sys.executable, "-m", "memlog", *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def memlog(*arguments: str, directory: Path, timeout: float = 240, **environment: str) -> str:
    """Runs memlog's command line and returns what it printed; fails where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "memlog", *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_helper(run: RunDirectory) -> None:
    """Ends a run's helper with SIGKILL, as soon as it has come up, and waits until it is gone."""
    deadline = time.monotonic() + 60
    while not (helpers := [file for file in run.files() if "helper" in file.process]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(helpers[0].process.removeprefix("helper-"))
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # no such file: it is gone
        while " Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.02)


def lives(pid: int) -> bool:
    """Whether a helper process has not ended."""
    try:
        process = psutil.Process(pid)
        return "memlog.delivery.helper" in process.cmdline() and process.status() != "zombie"
    except psutil.Error:
        return False
