"""Runs of the tests go into a folder of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import memlog


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    yield tmp_path
    memlog.finish()
