"""The command line as a program: exit code, pipes, signals and terminal."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support import child
from support.flamegraphs import document
from support.journals import GIB, MadeRun, at, batch, finished_run
from support.mlflow_server import sqlite_store

from memlog._internal.npm_package import SPEEDSCOPE
from memlog.events import End, Run
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import UploadState

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "memlog"]
STEPS = 60


def environment(**values: str) -> dict[str, str]:
    """This process's environment without the variables that trackers, memlog and rich read."""
    prefixes = ("MLFLOW_", "MEMLOG_", "FORCE_COLOR", "TTY_", "COLUMNS", "PYTHONIOENCODING")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {**clean, "TZ": "UTC", **values}


def memlog(
    directory: Path, *arguments: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    process = child.start_memlog(
        *arguments, directory=directory, inherited=environment(), **variables
    )
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start(directory: Path, *arguments: str, **variables: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=directory,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def root_of(directory: Path) -> Path:
    return directory / "memlog_runs"


def run_for_mlflow(directory: Path) -> RunDirectory:
    made = MadeRun(root_of(directory)).write(Run(at(0), "gpt", None, ("mlflow",), {}))
    made.write(*(batch(step, GIB + step) for step in range(STEPS)))
    return made.write(End(at(9), "finished")).closed()


def test_a_closed_pipe_prints_no_error(tmp_path: Path) -> None:
    for number in range(3):
        MadeRun(root_of(tmp_path), f"run{number}").write(
            Run(at(0), "a long name " * 20_000, None, (), {})
        ).closed()
    for arguments in (("runs",), ("runs", "--json"), ("show", "run1")):
        process = start(tmp_path, *arguments)
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
        assert errors == b""


def test_an_output_that_lacks_a_character_shows_the_rest(tmp_path: Path) -> None:
    UploadState(backend="mlflow", stage="done", delivered=7).save(finished_run(root_of(tmp_path)))
    MadeRun(root_of(tmp_path), "umlaut22").write(Run(at(0), "größe 大", None, (), {})).closed()
    output, _ = start(tmp_path, "runs", PYTHONIOENCODING="latin-1").communicate(timeout=60)
    shown = output.decode("latin-1")
    assert "mlflow 7 done" in shown
    assert "größe ?" in shown


def in_terminal(directory: Path, columns: int, *arguments: str) -> str:
    """Return a command's output in a terminal of this width."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=directory,
        env=environment(TERM="xterm", NO_COLOR="1"),
        stdin=child,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    shown = b""
    while chunk := _read(parent):
        shown += chunk
    os.close(parent)
    assert process.wait(timeout=60) == 0
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


def test_a_page_fits_its_terminal_and_cuts_no_id(tmp_path: Path) -> None:
    run = finished_run(root_of(tmp_path))
    problem = "the tracker is down, " * 12
    UploadState(backend="mlflow", stage="unreachable", problem=problem).save(run)
    for columns, *arguments in (
        (80, "runs"),
        (120, "runs"),
        (80, "show", "latest"),
        (80, "watch", "latest"),
    ):
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", in_terminal(tmp_path, columns, *arguments))
        lines = shown.splitlines()
        assert max(map(len, lines)) <= columns
        assert "k7m2xq9a" in shown


def test_a_tracker_that_is_down_is_one_line(tmp_path: Path) -> None:
    run_for_mlflow(tmp_path)
    down = "http://me:secret@127.0.0.1:9"
    done = memlog(tmp_path, "sync", "latest", "--timeout", "0", MLFLOW_TRACKING_URI=down)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("memlog: mlflow: ")
    assert "127.0.0.1" in line
    assert "nothing is lost, call `memlog sync k7m2xq9a` again" in line
    assert "secret" not in line
    shown = memlog(tmp_path, "show", "latest").stdout
    assert "nothing delivered, unreachable" in shown
    assert "secret" not in shown
    done = memlog(tmp_path, "sync", "latest", MLFLOW_TRACKING_URI=sqlite_store(tmp_path))
    assert done.stdout.startswith(f"mlflow: {2 * STEPS} points delivered")


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    run_for_mlflow(tmp_path)
    sync = ("sync", "latest", "--timeout", "100")
    process = start(tmp_path, *sync, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    state = root_of(tmp_path) / "k7m2xq9a" / "delivery" / "mlflow.json"
    while not state.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("lines", [1, 3])
def test_ctrl_c_ends_open_normally(tmp_path: Path, lines: int) -> None:
    """Ctrl-C ends the command with exit code 0, also while it prints the address."""
    (tmp_path / "graph.json").write_text(json.dumps(document()))
    cached = tmp_path / "cache" / "memlog" / f"speedscope-{SPEEDSCOPE.version}"
    cached.mkdir(parents=True)
    for name in ("index.html", "LICENSES.txt"):
        (cached / name).write_text("a page")
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    process = start(tmp_path, "open", "graph.json", "--no-browser", **variables)
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, complained = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"no longer shown" in output
    assert complained == b""
