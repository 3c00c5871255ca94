"""Servers that answer the trackers' real clients without end: a command fails soon, with little memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support import child
from support.journals import GIB, MadeRun, at, batch
from support.misbehaving import Misbehaving, misbehaving_server
from support.mlflow_server import environment_without_mlflow

from memlog.events import End, Run
from memlog.sink import Connection, Target
from memlog_mlflow import backend

pytestmark = pytest.mark.integration

MIB = 1024**2
SOON = 75.0
"""Maximum seconds from the first request to the command's end, also on a busy machine.

Without limits, some commands took over 100 s, or as long as the server answered.
"""
SMALL = 500 * MIB
"""Maximum memory of a command, in bytes. MLflow's client alone takes 180 MiB."""

COMMAND = """
    from pathlib import Path
    from memlog.cli.main import main

    try:
        main()
    finally:
        # Not ru_maxrss: the kernel hands that down from the process that started this one.
        status = Path("/proc/self/status").read_text()
        print("peak", int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


class Ended(NamedTuple):
    took: float
    """Seconds from the first request to the command's end."""
    peak: int
    """Peak resident set of the process, in bytes."""
    line: str


def command(server: Misbehaving, directory: Path, *arguments: str) -> Ended:
    """Run a command that must fail and print one line."""
    process = child.start(
        COMMAND,
        directory,
        *arguments,
        MEMLOG_DIR=str(directory / "runs"),
        MLFLOW_TRACKING_URI=server.url,
        WANDB_BASE_URL=server.url,
        WANDB_API_KEY="0" * 40,
    )
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    [line] = errors.splitlines()
    assert server.asked_at is not None
    return Ended(time.monotonic() - server.asked_at, int(output.split()[-1]), line)


def recorded(directory: Path, backend_name: str) -> None:
    MadeRun(directory / "runs").write(
        Run(at(0), "gpt", "language", (backend_name,), {}), batch(0, GIB), End(at(3), "finished")
    ).closed()


@pytest.mark.parametrize(
    ("backend_name", "answer"), [("mlflow", "headers byte by byte"), ("wandb", "silence")]
)
def test_sync_ends_soon(tmp_path: Path, backend_name: str, answer: str) -> None:
    recorded(tmp_path, backend_name)
    with misbehaving_server(answer) as server:
        ended = command(server, tmp_path, "sync", "latest", "--timeout", "2")
    assert ended.took < SOON
    assert ended.peak < SMALL
    assert ended.line.startswith(f"memlog: {backend_name}: ")
    assert "gave up after 2 s" in ended.line


def test_pull_ends_and_stays_small(tmp_path: Path) -> None:
    with misbehaving_server("a bomb of gzip") as server:
        ended = command(server, tmp_path, "pull", "a" * 32, "--backend", "mlflow", "-o", "out")
    assert ended.took < SOON
    assert ended.peak < SMALL
    assert ended.line.startswith("memlog: mlflow: ")


def test_a_health_page_without_end_is_not_read(tmp_path: Path) -> None:
    with environment_without_mlflow(), misbehaving_server("a body without end") as server:
        sink = backend.open_sink(Target("mine", None, connection=Connection(server.url)))
        sink.probe()
        assert server.sent < 16 * MIB
