"""Environment variables passed to the helper, and limits in memlog's own process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlog.sink import Connection
from memlog_mlflow import environment


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    saved = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    yield
    os.environ.clear()
    os.environ.update(saved)


@pytest.mark.parametrize(
    "name",
    [
        "MLFLOW_TRACKING_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AZURE_CLIENT_ID",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "DATABRICKS_TOKEN",
        "https_proxy",
        "HTTP_PROXY",
        "No_Proxy",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
    ],
)
def test_what_the_client_needs_comes_along(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "value")
    assert environment.gathered()[name] == "value"


@pytest.mark.parametrize(
    "name",
    ["MLFLOW_RUN_ID", "MLFLOW_ACTIVE_MODEL_ID", "MLFLOW_SQLALCHEMYSTORE_ECHO", "HOME", "HF_TOKEN"],
)
def test_nothing_else_comes_along(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "value")
    assert name not in environment.gathered()


def test_a_relative_tracking_uri_means_the_trainers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert environment.gathered()["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_training_script_comes_along_as_the_runs_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr=1"])
    os.environ.update(environment.gathered())
    assert environment.context_tags() == {"mlflow.source.name": "train.py"}


def test_tags_that_the_user_asks_for_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    mine = {"mlflow.source.name": "notebook", "team": "vision"}
    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", json.dumps(mine))
    os.environ.update(environment.gathered())
    assert environment.context_tags() == mine


@pytest.mark.parametrize("context", ["", "{", "[1]", "null"])
def test_a_context_that_is_no_object_means_no_tags(
    context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", context)
    assert environment.context_tags() == {}


def test_the_process_is_bounded_and_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "users-own")
    environment.apply(
        Connection(
            environment={
                "MLFLOW_TRACKING_USERNAME": "anna",
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "7",
                "MLFLOW_ACTIVE_MODEL_ID": "m-1",
            }
        )
    )
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "anna"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "MLFLOW_RUN_ID" not in os.environ
    assert "MLFLOW_ACTIVE_MODEL_ID" not in os.environ


def test_a_timeout_that_the_user_set_stays() -> None:
    environment.apply(Connection(environment={"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}))
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "60"
