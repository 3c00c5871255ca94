"""If standard streams or log handlers are closed, full or broken, only printed lines are lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import child

from memlog.events import Alert
from memlog.journal import find_run
from memlog.reports import summarize

pytestmark = pytest.mark.integration

AT_MOST = 60
"""Maximum seconds that each of these programs runs, also on a busy machine."""

STEPS = 3_000
"""More steps than fit into the space that the journal has allocated before the disk is full."""

TRAINER = """
    import json
    import logging
    import os
    import resource
    import sys

    import memlog

    class Raising:
        def write(self, text):
            raise RuntimeError("a stream of the user's own")
        flush = lambda self: None

    class Handler(logging.Handler):
        def emit(self, record):
            raise RuntimeError("a log handler of the user's own")

    def without_a_reader():
        reader, writer = os.pipe()
        os.close(reader)
        return os.fdopen(writer, "w", buffering=1, closefd=False)

    def full():
        return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1, closefd=False)

    def closed():
        stream = open(os.devnull, "w")
        stream.close()
        return stream

    def no_room(room):
        allowed = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000 if not room else allowed, allowed))

    def break_streams():
        if sys.argv[1] == "handler":
            logging.getLogger().addHandler(Handler())
        else:
            sys.stdout, sys.stderr = globals()[sys.argv[1]](), globals()[sys.argv[1]]()

    if sys.argv[2] == "before init":
        break_streams()
    options = dict(
        alerts=["host.rss > 1 MiB", "cuda7.allocated > 1 GiB"],
        config={{"memory_monitor_batches": 3, "memlog": {{"bind_grace": 0}}}},
    )
    with memlog.init("mlflow", dir="runs", finish_timeout=2, **options) as session:
        if sys.argv[2] == "after init":
            break_streams()
        {loop}
    no_room(True)
    # What Python itself makes at exit of lines that a stream never took is no affair of memlog's.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    with open("counts.json", "w") as file:
        json.dump([steps, session.health.dropped, session.health.faults], file)
"""
BY_HAND = f"""
        for steps in range(1, {STEPS + 1}):
            if steps == 20:
                no_room(False)
            session.step()
"""
UNCHANGED = f"""
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for steps in range(1, {STEPS + 1}):
            if steps == 20:
                no_room(False)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
"""


def train(directory: Path, kind: str, when: str, loop: str) -> tuple[Any, Any]:
    """Train on a disk that fills up, with a tracker that is down, so that memlog prints much."""
    script = TRAINER.format(loop=loop.strip())
    away = "http://127.0.0.1:9"
    process = child.start(script, directory, kind, when, MLFLOW_TRACKING_URI=away)
    output, errors = process.communicate(timeout=AT_MOST)
    assert process.returncode == 0, errors + output
    steps, dropped, faults = json.loads((directory / "counts.json").read_text())
    assert steps == STEPS
    return dropped, faults


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("closed", "before init"),
        ("full", "after init"),
        ("without_a_reader", "before init"),
        ("Raising", "after init"),
    ],
)
def test_init_steps_alerts_a_full_disk_and_finish_go_on(
    tmp_path: Path, kind: str, when: str
) -> None:
    dropped, faults = train(tmp_path, kind, when, BY_HAND)
    assert dropped["journal_write"] > 100
    assert any(cause.startswith("a subscriber to Batch: ") for cause in faults), faults
    assert any(cause.startswith("printing: ") for cause in faults)
    run = find_run(tmp_path / "runs", "latest")
    assert summarize(run).status == "finished"
    events = list(run.events())
    # The journal has the alert that could not be printed.
    assert any(isinstance(event, Alert) for event in events)


def test_a_log_handler_that_raises_breaks_nothing(tmp_path: Path) -> None:
    dropped, faults = train(tmp_path, "handler", "before init", BY_HAND)
    assert dropped["journal_write"] > 100
    assert faults["logging a warning"] >= 1


def test_an_unchanged_loop_goes_on_without_streams(tmp_path: Path) -> None:
    dropped, _ = train(tmp_path, "closed", "after init", UNCHANGED)
    assert dropped["journal_write"] > 100


UNSEARCHABLE = """
    import json
    import os
    import sys

    import memlog
    import memlog.journal.delivery_state

    folder = sys.argv[1]
    with memlog.init(
        "mlflow", dir=folder, finish_timeout=1, config={"memlog": {"segment_bytes": 4096}}
    ) as session:
        for _ in range(20):
            session.step()
        os.chmod(folder if sys.argv[2] == "parent" else session.directory, 0)
        if os.geteuid() == 0:
            os.seteuid(65534)  # whom permissions stop
        for _ in range(200):
            session.step()
    if os.getuid() == 0:
        os.seteuid(0)
    os.chmod(folder if sys.argv[2] == "parent" else session.directory, 0o755)
    print(json.dumps([session.health.dropped, session.health.faults]))
"""


@pytest.mark.parametrize("which", ["parent", "its own"])
def test_a_folder_that_can_not_be_searched_any_more_costs_no_event(
    tmp_path: Path, which: str
) -> None:
    away = "http://127.0.0.1:9"
    output = child.run(
        UNSEARCHABLE,
        tmp_path,
        str(tmp_path / "runs"),
        which,
        timeout=AT_MOST,
        MLFLOW_TRACKING_URI=away,
    )
    dropped, faults = json.loads(output)
    assert not dropped
    assert faults["beginning the journal's next segment: PermissionError"] > 1
    assert summarize(find_run(tmp_path / "runs", "latest")).steps == 220
