"""The user's state does not change: a list of it is compared before, during and after a whole session."""

import json
import os
from pathlib import Path

import pytest
from support import child
from support.wandb_file import read_only_run

PATHS = os.pathsep.join(
    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

pytestmark = pytest.mark.integration

TRAINER = """
    import atexit
    import json
    import logging
    import os
    import random
    import signal
    import sys
    import threading
    import warnings

    import mlflow
    import numpy
    import torch
    import wandb
    from support.users_state import differences, users_state
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import memlog

    # A user who has set all of it.
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    logging.basicConfig(level=logging.ERROR, format="users: %(message)s")
    warnings.filterwarnings("ignore", message="of the user's")
    sys.excepthook = lambda *error: sys.__excepthook__(*error)
    threading.excepthook = lambda arguments: print("the user's thread hook")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    os.environ["WANDB_NOTES"] = "the user's"
    atexit.register(print, "the user's, before init")

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()   # what torch itself does once
    register_optimizer_step_post_hook(lambda *_: None)
    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    rows = wandb.init(project="p", mode="offline", settings=quiet)
    run = mlflow.start_run()
    mlflow.log_metric("loss", 0.0, step=0)
    rows.log({"loss": 0.0}, step=0)

    def step(number):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        mlflow.log_metric("loss", number, step=number)
        rows.log({"loss": number}, step=number)

    before = users_state()
    session = memlog.init(
        ["mlflow", "wandb"],
        dir="runs",
        model=model,
        alerts=["host.rss > 1 MiB", "host.tree > 1 MiB", "host.rss grows > 1 KiB/epoch"],
        on_alert=lambda alert: None,
        config={"memory_monitor_batches": 2},
        finish_timeout=120,
    )
    atexit.register(print, "the user's, after init")
    tracker = memlog.MemoryTracker()
    epochs = memlog.EpochMemoryMonitor()
    for epoch in range(3):
        epochs.on_epoch_start()
        for number in range(1 + 6 * epoch, 7 + 6 * epoch):
            with memlog.track_memory("a step"):
                step(number)
            epochs.on_batch_end(number)
        epochs.on_epoch_end()
        tracker.record(f"epoch {epoch}")
    open("notes.txt", "w").write("kept")
    session.save_artifact("notes.txt", "report")
    during = users_state()
    memlog.finish()
    after = users_state()
    print(json.dumps([differences(before, during), differences(before, after)]))
    print("W&B's step", rows.step)
    mlflow.end_run()
    rows.finish()
"""

WHILE_IT_RECORDS = {
    "sys.meta_path",  # memlog's finder waits for the import of a trainer's library
    "threads",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
}


@pytest.mark.usefixtures("ready_store")
def test_a_whole_session_leaves_everything_as_it_was(tmp_path: Path) -> None:
    output = child.run(TRAINER, tmp_path, PYTHONPATH=PATHS)
    lines = output.splitlines()
    during, after = json.loads(next(line for line in lines if line.startswith("[{")))
    assert after == {}
    assert during.keys() == WHILE_IT_RECORDS
    assert [line for line in lines if line.startswith("the user's")] == [
        "the user's, after init",
        "the user's, before init",
    ]
    assert "W&B's step 18" in lines
    users = [row["loss"] for row in read_only_run(tmp_path).users_rows()]
    assert users == list(range(19))


BEFORE_TORCH = """
    import json

    from support.users_state import differences, users_state

    import memlog

    before = users_state()
    session = memlog.init("local", dir="runs")
    during = users_state()
    memlog.finish()
    print(json.dumps([differences(before, during), differences(before, users_state())]))
"""


def test_what_waits_for_torch_to_be_imported_is_gone_with_the_session(tmp_path: Path) -> None:
    output = child.run(BEFORE_TORCH, tmp_path, PYTHONPATH=PATHS)
    during, after = json.loads(output)
    assert (during.keys(), after) == ({"sys.meta_path"}, {})


ON_A_DEVICE = """
    import json

    import torch
    from support.users_state import differences, users_state

    import memlog

    device = torch.device("cuda")
    model = torch.nn.Linear(512, 512, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(torch.ones(64, 512, device=device)).sum().backward()
        optimizer.step()

    def figures():
        statistics = torch.cuda.memory_stats(device)
        return [statistics[f"{of}_bytes.all.peak"] for of in ("allocated", "reserved", "requested")]

    step()
    torch.empty(2**28, dtype=torch.uint8, device=device)   # a peak that no step comes near again
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    peaks, before = figures(), users_state()
    session = memlog.init("local", dir="runs", alerts=["device.peak > 1 MiB"])
    monitor = memlog.EpochMemoryMonitor()
    monitor.on_epoch_start()
    for number in range(20):
        with memlog.track_memory("a step"):
            step()
        monitor.on_batch_end(number)
    monitor.on_epoch_end()
    memlog.finish()
    snapshot = torch.cuda.memory._snapshot()
    recorded = sum(len(trace) for trace in snapshot["device_traces"])
    print(json.dumps([peaks, figures(), differences(before, users_state()), recorded]))
"""


@pytest.mark.cuda
def test_a_devices_peaks_and_memory_history_are_the_users(tmp_path: Path) -> None:
    output = child.run(ON_A_DEVICE, tmp_path, PYTHONPATH=PATHS)
    before, after, changed, recorded = json.loads(output.splitlines()[-1])
    assert after == before
    assert changed == {}
    assert recorded > 20
