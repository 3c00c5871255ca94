"""memlog's work on the trainer's thread, checked by Python's audit events."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from support import child

pytestmark = pytest.mark.integration

TRAINER = """
    import json
    import sys
    import threading

    import torch

    import memlog

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()   # what torch itself does once
    if "--joined" in sys.argv:
        import mlflow
        mlflow.start_run()
    memlog.init("mlflow", dir="runs")
    trainer = threading.get_ident()
    seen = []

    def audit(event, arguments):
        if threading.get_ident() == trainer:
            seen.append((event, str(arguments[:1])))

    sys.addaudithook(audit)
    for _ in range(300):
        step()
    heard = list(seen)
    threads = [thread.name for thread in threading.enumerate() if "memlog" in thread.name]
    modules = [name for name in ("mlflow", "wandb") if name in sys.modules]
    memlog.finish()
    print(json.dumps({"heard": heard, "threads": threads, "modules": modules}))
"""

FORBIDDEN = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "import", "urllib.")


@pytest.mark.usefixtures("ready_store")
@pytest.mark.parametrize("arguments", [[], ["--joined"]])
@pytest.mark.seed(18, 103)
def test_no_network_no_import_no_process_start_in_the_loop(
    tmp_path: Path, arguments: list[str]
) -> None:
    """If a run is joined in the first step, one file is opened: the next segment of the journal.

    The file in which the helper process saves the id of memlog's own run is read once a second, until the
    id is known.
    """
    result = json.loads(child.run(TRAINER, tmp_path, *arguments).splitlines()[-1])
    assert [event for event in result["heard"] if event[0].startswith(FORBIDDEN)] == []
    # os.write, the one thing that a step does, has no audit event.
    opened = [what for event, what in result["heard"] if event == "open" and not of_state(what)]
    assert len(opened) == len(arguments)
    assert all("/runs/" in what and "-0002.jsonl" in what for what in opened)
    assert result["threads"] == []
    assert result["modules"] == (["mlflow"] if arguments else [])


def of_state(opened: str) -> bool:
    """Return whether a file is the helper's state or one of its folders, which are opened one by one."""
    names = ("'delivery',", "'mlflow.json',")
    return any(name in opened for name in names) or re.search(r"/runs/\w{8}'", opened) is not None


STOPPED_HELPER = """
    import os
    import signal
    import time

    import memlog

    taken = []
    for _ in range(5):   # each ends the one before, at once
        begun = time.monotonic()
        session = memlog.init("mlflow", dir="runs")
        taken.append(time.monotonic() - begun)
    helper = session._live._helper.pid
    os.kill(helper, signal.SIGSTOP)
    for _ in range(20_000):
        session.step()
    begun = time.monotonic()
    session.finish(timeout=0)
    print(session.id, helper, min(taken), time.monotonic() - begun)
"""


def test_nothing_waits_for_a_helper_that_hangs(tmp_path: Path) -> None:
    """If the helper process never runs, training goes on and the journal is complete."""
    run_id, helper, init_seconds, finish_seconds = child.run(STOPPED_HELPER, tmp_path).split()
    os.kill(int(helper), signal.SIGKILL)
    # Waiting would take 10 s. `make bench` measures the real times.
    assert float(init_seconds) < 5.0
    assert float(finish_seconds) < 5.0
    segments = (tmp_path / "runs" / run_id).glob("trainer-*")
    assert sum(path.read_bytes().count(b'["batch",') for path in segments) == 20_000
