"""What tests of sessions share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import memlog


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of runs. A session that a test leaves open ends after it."""
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    yield tmp_path
    memlog.finish()
