"""If a server answers nonsense in MLflow's place, memlog reports its own error and sends the points later."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.mlflow_server import Answering, answering_server, environment_without_mlflow, points

from memlog.errors import DeliveryError
from memlog.events import Alert, Artifact
from memlog.sink import Connection, Target, TrackerRun
from memlog_mlflow import backend

pytestmark = pytest.mark.integration

ANSWERS = {
    "nothing": b"",
    "a page": b"<html>Sign in</html>",
    "an empty object": b"{}",
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"1e999",
    "half": b'{"run": {"info": {"run_id": "a',
    "wrong types": b'{"run": 7, "experiment": [], "runs": "x", "experiments": {"a": 1}}',
    "wrong fields": b'{"run": {"info": {"run_id": 7, "status": "ODD", "start_time": "x"}, "data": []}}',
    "no text": b"\xff\xfe\x00\x00",
    "deep": b"[" * 100_000,
    "large": b'{"run": "' + b"x" * 2_000_000 + b'"}',
}


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    monkeypatch.chdir(tmp_path)
    with environment_without_mlflow(), answering_server() as running:
        yield running


def problem_of(call: Callable[[], object]) -> str:
    """Return memlog's message on a call's error; empty if memlog accepts the answer."""
    try:
        call()
    except DeliveryError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("answer", "joined"), [(answer, at % 2 == 0) for at, answer in enumerate(ANSWERS)]
)
def test_nonsense_is_an_error_of_memlogs(
    answering: Answering, tmp_path: Path, answer: str, joined: bool
) -> None:
    answering.body = ANSWERS[answer]
    run = TrackerRun("a" * 32, answering.url) if joined else None
    sink = backend.open_sink(
        Target("mine", run, project="project", connection=Connection(answering.url))
    )
    (tmp_path / "file").write_bytes(b"content")
    alert = Alert(1, 0, "warning", "rule", "title", "text")
    for call in (
        sink.open,
        lambda: sink.log_points(points(3)),
        lambda: sink.log_parameters({"torch": "2.9"}),
        lambda: sink.log_alerts([alert], 0),
        lambda: sink.log_artifact(
            Artifact(1, "file", "file", "artifacts/file", 7), tmp_path / "file"
        ),
        lambda: sink.close("finished"),
    ):
        problem = problem_of(call)
        assert len(problem.splitlines()) <= 1
        assert len(problem) < 1000
    assert {path.name for path in tmp_path.iterdir()} <= {"file"}
