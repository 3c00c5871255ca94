"""The tracer's example, as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import child, speedscope

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[3] / "examples" / "memory_tracer_demo.py"


@pytest.mark.seed(227, 228, 229, 230, 231, 232)
def test_all_five_demos_run(tmp_path: Path) -> None:
    done = child.run_program(EXAMPLE, directory=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr
    for name in ("basic", "fragmentation", "transformer", "flame", "overhead"):
        assert f"== {name} on c" in done.stdout
    assert "Peak " in done.stdout
    assert "layers.3: " in done.stdout
    assert "Overhead: " in done.stdout
    speedscope.check(json.loads((tmp_path / "memory_profile.speedscope.json").read_bytes()))
    assert {path.name for path in tmp_path.iterdir()} == {
        "memory_profile.speedscope.json",
        "memory_snapshot.pickle",
        "memory_timeline.json",
        "memory_trace.json.gz",
    }
