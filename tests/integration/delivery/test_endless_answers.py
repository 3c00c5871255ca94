"""Servers that never answer the trackers' real clients, or without end."""

from __future__ import annotations

import time
from pathlib import Path

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
"""Seconds from the first question to the end, on a busy machine too: some took over 100 s, or as long as the
server did."""


def command(server: Misbehaving, directory: Path, *arguments: str) -> tuple[float, str]:
    """A command that fails, in one line: the seconds since the server was first asked, and the line."""
    process = child.start(
        "from memlog.cli.main import main\nmain()",
        directory,
        *arguments,
        MEMLOG_DIR=str(directory / "runs"),
        MLFLOW_TRACKING_URI=server.url,
        WANDB_BASE_URL=server.url,
        WANDB_API_KEY="0" * 40,
    )
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    [line] = errors.splitlines()
    assert server.asked_at is not None
    return time.monotonic() - server.asked_at, line


def recorded(directory: Path, backend_name: str) -> None:
    MadeRun(directory / "runs").write(
        Run(at(0), "gpt", "language", (backend_name,), {}), batch(0, GIB), End(at(3), "finished")
    ).closed()


@pytest.mark.parametrize("backend_name", ["mlflow", "wandb"])
def test_sync_ends_soon_if_the_server_never_answers(tmp_path: Path, backend_name: str) -> None:
    recorded(tmp_path, backend_name)
    with misbehaving_server("silence") as server:
        took, line = command(server, tmp_path, "sync", "latest", "--timeout", "5")
    assert took < SOON
    assert line.startswith(f"memlog: {backend_name}: ")
    assert "gave up after 5 s" in line


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow")
def test_a_health_page_without_end_is_not_read(tmp_path: Path) -> None:
    with environment_without_mlflow(), misbehaving_server("a body without end") as server:
        sink = backend.open_sink(Target("mine", None, connection=Connection(server.url)))
        sink.probe()
        assert server.sent < 16 * MIB
