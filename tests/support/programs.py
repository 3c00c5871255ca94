"""Programs with a session that end in every way, and their runs after their helpers have ended."""

import time
from pathlib import Path

from memlog.journal import list_runs
from memlog.reports import Summary, summarize
from support import child

AT_MOST = 60
"""Maximum seconds that each of these programs runs, also on a busy machine."""

PREFACE = """
    import os
    import signal
    import sys
    import time

    import memlog

    def begin(backend="local", **options):
        session = memlog.init(backend, dir="runs", **options)
        print("helper", session._live._helper.pid, flush=True)
        return session
"""


def ended(directory: Path, script: str, *, code: int = 0) -> list[Summary]:
    """Run a program to its end; return its runs, after all helpers that it started have ended."""
    process = child.start(PREFACE + script, directory)
    output, errors = process.communicate(timeout=AT_MOST)
    assert process.returncode == code, errors
    expect_no_helper(output)
    return summaries(directory)


def expect_no_helper(output: str) -> None:
    helpers = [int(line.split()[1]) for line in output.splitlines() if line.startswith("helper ")]
    assert helpers
    deadline = time.monotonic() + AT_MOST
    while any(child.lives(pid) for pid in helpers):
        assert time.monotonic() < deadline, "a helper outlives its trainer"
        time.sleep(0.05)


def summaries(directory: Path) -> list[Summary]:
    return [summarize(run) for run in list_runs(directory / "runs")]


def status_and_steps(directory: Path, script: str, code: int = 0) -> list[tuple[str, int]]:
    return [(run.status, run.steps) for run in ended(directory, script, code=code)]
