"""Tracking URIs: relative ones are the trainer's, and no message shows a password."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlog_mlflow.uris import absolute_uri, is_folder, link_to, scheme_of


@pytest.mark.parametrize(
    ("uri", "resolved"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"),
        ("sqlite:///runs/mlflow.db?timeout=5", "sqlite:///{here}/runs/mlflow.db?timeout=5"),
        ("./mlruns", "{here}/mlruns"),
        ("mlruns", "{here}/mlruns"),
    ],
)
def test_a_relative_path_is_resolved_where_the_trainer_is(
    uri: str, resolved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri(uri) == resolved.format(here=tmp_path)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "/data/mlruns",
        "sqlite:////data/mlflow.db",
        "sqlite:///:memory:",
        "sqlite://",
        "file:///data/mlruns",
        "http://tracking:5000/prefix",
        "postgresql+psycopg2://user@host/mlflow",
        "databricks",
        "databricks://profile",
        "databricks-uc",
        "arn:aws:sagemaker:eu-west-1:1:mlflow-tracking-server/x",
    ],
)
def test_other_uris_stay_as_they_are(uri: str) -> None:
    assert absolute_uri(uri) == uri


def test_schemes_are_distinguished() -> None:
    assert scheme_of("postgresql+psycopg2://host/db") == "postgresql"
    assert scheme_of("HTTPS://host") == "https"
    assert scheme_of("./mlruns") == ""
    assert is_folder("/data/mlruns")
    assert is_folder("file:///data/mlruns")
    assert not is_folder("databricks")


@pytest.mark.parametrize(
    ("uri", "link"),
    [
        ("http://host:5000", "http://host:5000/#/experiments/7/runs/0a1b"),
        ("https://me:secret@host/flow/", "https://host/flow/#/experiments/7/runs/0a1b"),
        ("sqlite:////data/mlflow.db", "mlflow ui --backend-store-uri sqlite:////data/mlflow.db"),
        ("/my data/mlruns", "mlflow ui --backend-store-uri '/my data/mlruns'"),
        ("file:///data/mlruns", "mlflow ui --backend-store-uri file:///data/mlruns"),
        ("postgresql://me:secret@host/db", None),
        ("databricks", None),
    ],
)
def test_a_link_leads_to_the_run_or_to_the_command_that_shows_it(
    uri: str, link: str | None
) -> None:
    assert link_to(uri, "7", "0a1b") == link
