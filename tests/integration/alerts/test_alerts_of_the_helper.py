"""Alerts about the helper process's figures reach the console, the callback and the journal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memlog.events import Alert
from memlog.journal import list_runs

pytestmark = pytest.mark.integration

SCRIPT = """
import threading, memlog

heard = threading.Event()

def on_alert(alert):
    heard.set()
    raise ValueError("an error in the user's callback")

session = memlog.init("local", alerts=["host.tree > 1 MiB", "host.rss > 9 TiB"], on_alert=on_alert,
                      config={"memlog": {"sample_interval": 0.05}})
session.step()
assert heard.wait(60), "the helper's alert never came"
memlog.finish()
print("faults:", dict(session.health.faults))
"""


def test_an_alert_of_the_helpers_is_printed_and_called(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "MEMLOG_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if "host.tree" in line]
    assert "over 1 MiB" in line
    assert done.stdout == "faults: {'on_alert: ValueError': 1}\n"
    (run,) = list_runs(tmp_path)
    found = [
        (file.process.split("-")[0], entry.event.rule)
        for file in run.files()
        for entry in file.read()
        if isinstance(entry.event, Alert)
    ]
    assert found == [("helper", "host.tree > 1 MiB")]
