"""Fixtures of the tests of commands."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def plain_environment(tmp_path: Path) -> Iterator[None]:
    """Variables of the environment that change what commands print."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLOG_DIR", str(tmp_path))
        patch.setenv("TZ", "UTC")
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        time.tzset()
        yield
    time.tzset()
