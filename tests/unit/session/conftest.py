"""Fixtures of the tests of sessions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import memlog


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of runs. A session that a test leaves open ends after it."""
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    monkeypatch.delenv("MEMLOG_BACKEND", raising=False)
    monkeypatch.delenv("MEMLOG_ENABLED", raising=False)
    yield tmp_path
    memlog.finish()
