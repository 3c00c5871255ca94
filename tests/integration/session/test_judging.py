"""Growth and alert rules are judged once, whichever process judges them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import child

from memlog.events import Alert, Finding
from memlog.journal import list_runs

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SCRIPT = """
import json, os, signal, sys, time, torch, memlog
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
heard = []
session = memlog.init(
    "local", alerts="host.rss > 1 MiB", on_alert=lambda alert: heard.append(alert.title)
)
helper = session._live._helper
how, kept, fallen = sys.argv[1], [], 0
if how == "stopped":
    os.kill(helper.pid, signal.SIGSTOP)
for step in range(160):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(torch.ones(2**18))
    time.sleep(0.01)
    if how == "killed" and step == 60:
        os.kill(helper.pid, signal.SIGKILL)
    if how == "settled" and step in (120, 121, 159):
        session._live._requests.settle(time.monotonic() + 60, session._live._delivery.ask_to_judge)
        assert [title for title in heard if "`kept`" in title], heard
stopped = helper.pid
begun = time.monotonic()
memlog.finish() if how != "stopped" else session.finish(timeout=0.5)
print(json.dumps([stopped, time.monotonic() - begun, heard]))
"""
NAMED = "`kept`, a list in `__main__` (train.py:18), gains one tensor per step"


@pytest.mark.parametrize("how", ["well", "settled", "killed", "stopped"])
def test_everything_is_found_once(tmp_path: Path, how: str) -> None:
    """The helper process is well, judges several times, is killed, or never runs."""
    helper, seconds, heard = json.loads(child.run(SCRIPT, tmp_path, how, OMP_NUM_THREADS="1"))
    if how == "stopped":
        assert seconds < 10  # it waits half a second for the helper, and judges a short journal
        os.kill(helper, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while psutil.pid_exists(helper) and time.monotonic() < deadline:
            time.sleep(0.1)
    (run,) = list_runs(tmp_path / "memlog_runs")
    events = list(run.events())
    findings = [event.title for event in events if isinstance(event, Finding)]
    assert [NAMED in title for title in findings] == [True]
    rules = [event.rule for event in events if isinstance(event, Alert)]
    assert sorted(rules) == ["host.rss > 1 MiB", "memlog: kept_tensors"]
    assert [NAMED in title for title in sorted(heard)] == [True, False]
