"""Programs that run out of memory, or are killed, and the reports on their ends."""

import subprocess
import textwrap
import time
from pathlib import Path

from memlog.events import Alert
from memlog.journal import RunDirectory, list_runs
from support import child as user_program

LIMITED = """
    import resource
    import memlog

    GIB = 1024**3
    with memlog.init("local") as session:
        for _ in range(3):
            session.step()
        resource.setrlimit(resource.RLIMIT_AS, (4 * GIB, 4 * GIB))
        {body}
"""


def child(tmp_path: Path, program: str) -> "subprocess.Popen[str]":
    return user_program.start(program, tmp_path, MEMLOG_DIR=str(tmp_path), OMP_NUM_THREADS="1")


def ended(tmp_path: Path, program: str, code: int = 1) -> str:
    """Run a child that ends with a code; return its stderr."""
    with child(tmp_path, program) as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == code, errors
    return errors


def limited(body: str) -> str:
    return LIMITED.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))


def only_run(tmp_path: Path) -> RunDirectory:
    (run,) = list_runs(tmp_path)
    return run


def wait_for_report(run: RunDirectory) -> str:
    report = run.artifacts / "postmortem.md"
    deadline = time.monotonic() + 60
    while not any(isinstance(event, Alert) for event in run.events()):
        assert time.monotonic() < deadline, (run.path / "helper.log").read_text()
        time.sleep(0.1)
    return report.read_text()
