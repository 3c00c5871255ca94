"""`make release-check`: a wheel as a stranger gets it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_checkout_passes_the_checks_before_a_release(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, ".ci/release_check.py", "--dist", tmp_path],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line[:1] for line in lines] == ["✓"] * 6
    assert "The process's memory grows by " in lines[-1]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".whl"]
