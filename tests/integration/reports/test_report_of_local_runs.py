"""A run without a tracker gets its report after its end. The program does not wait for the report."""

import os
import time
from pathlib import Path

import pytest
from support.journals import MIB, MadeRun

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.client import HelperProcess
from memlog.delivery.helper.protocol import Begin, Finish
from memlog.events import Artifact, Batch, End, Health, now_us
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import HelperLock
from memlog.reports import encode, summarize
from memlog.reports.summary import SummaryCache
from memlog.settings import Settings

pytestmark = pytest.mark.integration


def ended(folder: Path, seconds: float) -> tuple[RunDirectory, str]:
    """Return a local run that has lasted ``seconds``, and the name of its helper process, which has ended."""
    run = MadeRun(folder, alive=True)
    begun_us = now_us() - int(seconds * 1e6)
    for step in range(20):
        run.write(Batch(begun_us + step, step, 300 * MIB, 300 * MIB, "exact"))
    settings = Settings(backends=("local",), directory=str(folder))
    helper = HelperProcess(Diagnostics())
    helper.start(Begin(str(run.directory.path), begun_us, os.getpid(), settings))
    end = End(now_us(), "finished")
    run.write(end)
    health = Health(now_us(), 19, None, 0.0, {}, {})
    assert helper.finish(Finish(end, health), 60, lambda _: False) == "delivered"
    return run.directory, f"helper-{helper.pid}"


def reports_of(run: RunDirectory) -> list[str]:
    """The processes that have published a report of a run."""
    return [
        file.process
        for file in run.files()
        for entry in file.read()
        if isinstance(entry.event, Artifact) and entry.event.is_report
    ]


def is_left(run: RunDirectory) -> bool:
    """Return whether the helper and the process that makes the report have ended. Both hold the lock."""
    with HelperLock(run) as is_free:
        return is_free


def test_it_is_made_after_the_helper_has_ended(tmp_path: Path) -> None:
    run, helper = ended(tmp_path, 60)
    deadline = time.monotonic() + 60
    while not (processes := reports_of(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes) == 1
    assert helper not in processes
    text = (run.artifacts / "report.html").read_text(encoding="utf-8")
    assert "steady" in text
    assert "<script" in text
    while not is_left(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    # The process that made the report has read the whole journal, so the first `memlog show` need not.
    cached = SummaryCache(run).load(alive=False)
    assert cached is not None
    assert encode(summarize(run, remember=True)) == encode(summarize(run))


def test_a_run_of_seconds_gets_none(tmp_path: Path) -> None:
    run, _ = ended(tmp_path, -60)  # < 0, so that the run counts as short also on a busy machine
    deadline = time.monotonic() + 60
    while not is_left(run):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reports_of(run) == []
    assert not (run.artifacts / "report.html").exists()
