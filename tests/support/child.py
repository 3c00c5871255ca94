"""Start training scripts like a user's from tests, each in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil

from memlog import __main__ as command_line
from memlog.journal import RunDirectory
from support.fork_server import ForkedProcess, libraries_of

CLIENTS = ("mlflow", "wandb")
"""Libraries of the trackers."""
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def start(
    script: str,
    directory: Path,
    *arguments: str,
    stdin: int | None = None,
    fork: bool = True,
    **environment: str,
) -> "subprocess.Popen[str]":
    """Start a Python script in ``directory``, which becomes its working directory.

    Libraries that the script imports first are imported already. In memlog's helper process, the client of a
    tracker that the script names is imported already. With ``fork=False``, nothing is imported already.
    """
    path = directory / "train.py"
    path.write_text(textwrap.dedent(script))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "MEMLOG_"))}
    everything, streams = {**clean, **environment}, {"stdin": stdin, **PIPES}
    return start_program(
        path, *arguments, directory=directory, environment=everything, fork=fork, **streams
    )


def start_program(
    path: Path,
    *arguments: str,
    directory: Path,
    environment: Mapping[str, str],
    fork: bool = True,
    **streams: int | None,
) -> "subprocess.Popen[str]":
    """Start ``python path …``. Libraries that the program imports first are imported already."""
    script = path.read_text(encoding="utf-8")
    libraries = libraries_of(script)
    named = tuple(
        one for one in CLIENTS if "memlog" in script and (one in script or one in arguments)
    )
    helper = _has_clients(libraries, named)
    if fork and (libraries or helper) and sys.platform == "linux":
        places, variables = (directory, path.parent), dict(environment)
        return ForkedProcess(
            libraries or named, path, arguments, *places, variables, helper, **streams
        )
    command = [sys.executable, str(path), *arguments]
    return subprocess.Popen(command, cwd=directory, env=environment, text=True, **streams)


def _has_clients(
    libraries: tuple[str, ...], named: tuple[str, ...]
) -> Literal[False, True, "alone"]:
    """Return True if script and helper have imported a named client; "alone" if only the helper has."""
    if not libraries and named:
        return "alone"
    return not {*named}.isdisjoint(libraries)


def run_program(
    path: Path,
    *arguments: str,
    directory: Path,
    environment: Mapping[str, str],
    timeout: float = 240,
) -> "subprocess.CompletedProcess[str]":
    """Run ``python path …`` in ``directory`` to its end."""
    process = start_program(path, *arguments, directory=directory, environment=environment, **PIPES)
    output, errors = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(
    script: str,
    directory: Path,
    *arguments: str,
    timeout: float = 240,
    fork: bool = True,
    **environment: str,
) -> str:
    """Run a Python script to its end, as `start` does, and return its output; fail if it fails."""
    process = start(script, directory, *arguments, fork=fork, **environment)
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return output


COMMANDS = """
    import json
    import sys

    import mlflow
    import wandb

    from memlog.cli.main import main

    for arguments in json.loads(sys.argv[1]):
        sys.argv = ["memlog", *arguments]
        try:
            main()
        except SystemExit as end:
            assert not end.code, arguments
"""


def commands(*arguments: tuple[str, ...], directory: Path, **environment: str) -> str:
    """Run memlog's commands one after the other in one process, which imports the clients only once."""
    return run(COMMANDS, directory, json.dumps(arguments), **environment)


def start_memlog(
    *arguments: str, directory: Path, inherited: Mapping[str, str] | None = None, **environment: str
) -> "subprocess.Popen[str]":
    """Start memlog's command line in ``directory``.

    The trackers' clients are imported already if the command needs any of them.
    """
    everything = {**(os.environ if inherited is None else inherited), **environment}
    if arguments[0] in ("pull", "sync") and sys.platform == "linux":
        program = Path(command_line.__file__)
        return ForkedProcess(CLIENTS, program, arguments, directory, directory, everything, **PIPES)
    command = [sys.executable, "-m", "memlog", *arguments]
    return subprocess.Popen(command, cwd=directory, env=everything, text=True, **PIPES)


def memlog(*arguments: str, directory: Path, timeout: float = 240, **environment: str) -> str:
    """Run memlog's command line and return its output; fail if it fails."""
    process = start_memlog(*arguments, directory=directory, **environment)
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return output


def kill_helper(run: RunDirectory) -> None:
    """End a run's helper process with SIGKILL as soon as it has started, and wait until it is gone."""
    deadline = time.monotonic() + 60
    while not (helpers := [file for file in run.files() if "helper" in file.process]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(helpers[0].process.removeprefix("helper-"))
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # no such file: the process is gone
        while " Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.02)


def lives(pid: int) -> bool:
    """Return True if a helper process has not ended."""
    try:
        process = psutil.Process(pid)
        begun_as = {"memlog.delivery.helper", "support.fork_server"} & {*process.cmdline()}
        return bool(begun_as) and process.status() != "zombie"
    except psutil.Error:
        return False
