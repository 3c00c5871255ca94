"""The probe tells trackers that are absent, fail, or refuse: soon, and without a password."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support.mlflow_server import (
    IN_PROCESS,
    Answering,
    answering_server,
    free_port,
    points,
    rss_rows,
    sink_for,
)

from memlog.errors import TrackerRejectedError, TrackerUnavailableError

pytestmark = IN_PROCESS


@pytest.fixture
def answering() -> Iterator[Answering]:
    with answering_server() as running:
        yield running


# A database that is in trouble


def test_a_folder_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    sink = sink_for(f"sqlite:///{tmp_path}/not mounted/mlflow.db")
    with pytest.raises(TrackerUnavailableError, match=r"there is no folder .*not mounted"):
        sink.probe()
    assert not (tmp_path / "not mounted").exists()


def test_a_database_yet_to_be_made_is_there(tmp_path: Path) -> None:
    sink_for(f"sqlite:///{tmp_path}/new.db").probe()
    assert not (tmp_path / "new.db").exists()


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database" * 100)
    with pytest.raises(TrackerUnavailableError, match="not a database"):
        sink_for(f"sqlite:///{tmp_path}/mlflow.db").probe()
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(TrackerUnavailableError, match="unable to open"):
        sink_for(f"sqlite:///{tmp_path}/folder.db").probe()


def test_a_database_server_that_is_gone_is_unavailable() -> None:
    sink = sink_for(f"postgresql+psycopg2://anna:s3cret@127.0.0.1:{free_port()}/mlflow")
    with pytest.raises(TrackerUnavailableError, match="refused") as caught:
        sink.probe()
    assert "s3cret" not in str(caught.value)


def test_a_locked_database_is_unavailable_until_it_is_free(
    uri: str, client: MlflowClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = sink_for(uri)
    run_id = sink.open().run_id
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TrackerUnavailableError, match="locked"):
            sink.probe()
        other.execute("ROLLBACK")
    assert capfd.readouterr() == ("", "")
    sink.probe()
    sink.log_points(points(10))
    assert len(rss_rows(client, run_id)) == 10


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_that_answers_is_there(answering: Answering, status: int) -> None:
    answering.status = status
    sink_for(f"{answering.url}/prefix/").probe()
    assert answering.asked[0][0] == "/prefix/health"


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_refuses_the_credentials_says_so(answering: Answering, status: int) -> None:
    answering.status = status
    sink = sink_for(answering.url)
    for call in (sink.probe, sink.open):
        with pytest.raises(TrackerUnavailableError, match="refuses the credentials"):
            call()


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_server_in_trouble_is_unavailable_at_once(answering: Answering, status: int) -> None:
    answering.status = status
    sink = sink_for(answering.url, joined="0" * 32)
    for call in (sink.probe, sink.open):
        with pytest.raises(TrackerUnavailableError, match=str(status)):
            call()
    # Once each: a second "create run" could make a second run.
    assert len(answering.asked) == 2


def test_a_request_that_is_too_large_is_rejected(answering: Answering) -> None:
    answering.status = 413
    with pytest.raises(TrackerRejectedError):
        sink_for(answering.url, joined="0" * 32).open()


def test_credentials_are_used_and_never_shown(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    sink_for(answering.url).probe()
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    with_userinfo = f"http://anna:s3cret@127.0.0.1:{answering.server_port}"
    sink_for(with_userinfo).probe()
    assert [asked[1] for asked in answering.asked] == ["Bearer t0ken", "Basic YW5uYTpzM2NyZXQ="]
    for status in (401, 500, 503):
        answering.status = status
        sink = sink_for(with_userinfo, joined="0" * 32)
        for call in (sink.probe, sink.open):
            with pytest.raises(TrackerUnavailableError) as caught:
                call()
            assert "s3cret" not in str(caught.value)


def test_a_server_that_is_gone_or_silent_is_unavailable_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    began = time.monotonic()
    with pytest.raises(TrackerUnavailableError, match="refused"):
        sink_for(f"http://127.0.0.1:{free_port()}").probe()
    with Answering(200) as silent, pytest.raises(TrackerUnavailableError, match="timeout"):
        sink_for(silent.url).probe()
    assert time.monotonic() - began < 60  # MLflow's own tries take minutes


def test_nothing_is_asked_where_nothing_can_be() -> None:
    for hosted in ("databricks", "databricks://profile"):
        sink_for(hosted).probe()
