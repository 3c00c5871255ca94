"""Many more damaged journals than a unit test has time for."""

from pathlib import Path

import pytest
from support.fuzz import meet

pytestmark = pytest.mark.slow


def test_six_hundred_damaged_runs_break_nothing(tmp_path: Path) -> None:
    for seed in range(1_000, 1_600):
        meet(tmp_path / str(seed), seed)
