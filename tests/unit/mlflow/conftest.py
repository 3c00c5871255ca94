"""An MLflow store for each test."""

from pathlib import Path

import pytest
from mlflow import MlflowClient
from support.mlflow_server import sqlite_store


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return sqlite_store(tmp_path)


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(uri)
