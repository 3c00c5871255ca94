"""The page beside a CUDA allocator's snapshot, which the helper process writes when memory ran out."""

from pathlib import Path
from typing import Any

from support import device_snapshots
from support.journals import GIB, MadeRun, at, batch

from memlog.artifacts.pulling import kept
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.events import End, OutOfMemory
from memlog.journal import RunDirectory
from memlog.oom.observer import keep_snapshot

FAILURE = OutOfMemory(
    at(1), 0, "cuda0", 2**31, 12345, 2**36, None, 2**33, 2**33, None, None, "CUDA out of memory."
)


def failed(tmp_path: Path, snapshot: Any) -> RunDirectory:
    made = MadeRun(tmp_path).write(batch(0, GIB))
    made.write(keep_snapshot(made.directory, snapshot), FAILURE, End(at(2), "failed"))
    return made.closed()


def test_it_has_what_is_in_use(tmp_path: Path) -> None:
    run = failed(tmp_path, device_snapshots.training())
    explain_afterwards(run)
    names = [artifact.name for artifact in kept(run)]
    assert names == ["out-of-memory.pickle", "out-of-memory.html", "postmortem.md", "report.html"]
    page = (run.artifacts / "out-of-memory.html").read_text(encoding="utf-8")
    assert "<h1>Live bytes, device 0</h1>" in page
    assert "model (/src/model.py:2)" in page


def test_without_it_the_report_is_written_nevertheless(tmp_path: Path) -> None:
    run = failed(tmp_path, device_snapshots.snapshot())
    explain_afterwards(run)
    names = [artifact.name for artifact in kept(run)]
    assert names == ["out-of-memory.pickle", "postmortem.md", "report.html"]
