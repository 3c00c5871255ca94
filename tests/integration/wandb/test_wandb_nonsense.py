"""If a server answers nonsense to the real SDK in W&B's place, memlog reports its own error in one line."""

import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from support.faults import FINE, Fault
from support.wandb_server import WandbServer

from memlog.errors import MemlogError
from memlog.events import Alert, Artifact
from memlog.sink import Connection, Point, Target
from memlog_wandb import WandbBackend

pytestmark = pytest.mark.integration

ANSWERS = {
    "a page": b"<html>Sign in</html>",
    "an empty object": b'{"data": {}}',
    "wrong types": b'{"data": {"viewer": 7, "model": [], "project": "x", "upsertBucket": {"bucket": 1}}}',
    "deep": b"[" * 100_000,
}


@pytest.fixture
def _no_service_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kill wandb's service process, because wandb does not wait for it after a nonsensical answer."""
    started: list[subprocess.Popen[Any]] = []

    class Recorded(subprocess.Popen[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield
    wandb.teardown()
    for process in started:
        process.kill()
        process.wait(timeout=60)
    gc.collect()  # wandb's tasks that failed are logged as they are collected: here, and in no other test


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _no_service_left: None
) -> Iterator[WandbServer]:
    """Start a server for a new service process of wandb, which waits only a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memlog_wandb.sink.INIT_TIMEOUT", 1.0)
    with WandbServer() as running, pytest.MonkeyPatch.context() as environment:
        for name, value in (running.environment | {"WANDB_SILENT": "true"}).items():
            environment.setenv(name, value)
        environment.setenv("WANDB_FINISH_TIMEOUT", "1")
        yield running


def problem_of(call: Callable[[], object]) -> str:
    """Return memlog's message on a call's error; empty if memlog accepts the answer."""
    try:
        call()
    except MemlogError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("answer", ANSWERS)
def test_nonsense_is_an_error_of_memlogs(server: WandbServer, tmp_path: Path, answer: str) -> None:
    backend, connection = WandbBackend(), Connection(server.url, server.environment)
    sink = backend.open_sink(Target("mine", None, project="p", connection=connection))
    store = backend.open_store(connection)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"content")
    points = [Point("memory/host/rss_mib", 1.0, "step", 0, 1_795_000_000_000_000)]
    alert = Alert(1, 0, "warning", "rule", "title", "text")
    artifact = Artifact(1, "file", "file", "artifacts/file", 7)
    server.fault = Fault(status=200, body=ANSWERS[answer])
    problems = [problem_of(sink.open), problem_of(lambda: store.list_artifacts("mine"))]
    server.fault = FINE  # open the run, and then answer nonsense
    sink.open()
    server.fault = Fault(status=200, body=ANSWERS[answer])
    problems += [
        problem_of(lambda: sink.log_points(points)),
        problem_of(lambda: sink.log_alerts([alert], 0)),
        problem_of(lambda: sink.log_artifact(artifact, folder / "file")),
        problem_of(lambda: sink.close("finished")),
    ]
    # wandb accepts an empty object as a run without a name.
    assert all(problems[:2]) or answer == "an empty object"
    assert all(len(problem.splitlines()) <= 1 and len(problem) < 1000 for problem in problems)
    assert {path.name for path in folder.iterdir()} == {"file"}
    assert {path.name for path in tmp_path.iterdir()} <= {"folder", "wandb"}
