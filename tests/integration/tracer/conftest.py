"""Folders for runs, and a compiler that has compiled nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo

import memlog


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    yield tmp_path
    memlog.finish()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Discard compiled code, which changes what is compiled later and can keep windows from opening."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
