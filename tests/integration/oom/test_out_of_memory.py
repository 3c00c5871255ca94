"""A report explains why a run ended: child processes that run out of memory, or are killed."""

import os
import re
import signal
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from support import child as user_program
from support import device_snapshots
from support.failing import child, ended, limited, only_run, wait_for_report
from support.truth import wait_until_delivered

import memlog
from memlog.artifacts.snapshots import read_snapshot
from memlog.cli.sync import sync
from memlog.events import Alert, Artifact, End, OutOfMemory
from memlog.journal import new_run
from memlog.oom.observer import keep_snapshot
from memlog.reports.page import html
from memlog.trace.exporters import snapshot_graph

pytestmark = pytest.mark.integration

TORCH = """
    import resource
    import torch
    import memlog

    class Greedy(torch.nn.Module):
        def forward(self, x):
            return x.new_zeros(2**33)

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(Greedy()))
    memlog.init("local", finish_timeout=60)   # unwrapped: seen at exit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.ones(4)).sum().backward()
    optimizer.step()
    resource.setrlimit(resource.RLIMIT_AS, (8 * 1024**3, 8 * 1024**3))
    model(torch.ones(4))
"""

FOREVER = """
    import sys, time
    import memlog

    session = memlog.init("local")
    for _ in range(30):
        session.step()
    helper = session._live._helper.pid
    print(helper, flush=True)
    time.sleep(120)
"""


CHAINED = """
    def load():
        try:
            np.ones(2**30)
        except MemoryError as error:
            raise RuntimeError("the data set can't be loaded") from error

    import numpy as np
    load()
"""


def test_a_failed_allocation_behind_the_error_that_ended_the_program(tmp_path: Path) -> None:
    errors = ended(tmp_path, limited(CHAINED))
    run = only_run(tmp_path)
    assert f"memlog: how the run ended is explained in {run.path}/artifacts/postmortem.md" in errors
    text = wait_for_report(run)
    assert text.startswith("# Out of memory on the host after step 2, 8.0 GiB requested\n")
    assert "the error that ended the program: `RuntimeError: the data set can't be loaded`" in text
    assert "The request was made outside the model's layers" in text
    assert "the limit on the process's address space (ulimit -v)" in text
    found = list(run.events())
    assert [event.status for event in found if isinstance(event, End)] == ["failed"]
    assert [event.kind for event in found if isinstance(event, Artifact)] == ["postmortem"]
    page = html(run)
    assert "Out of memory on the host after step 2" in page
    assert "the limit on the process's address space (ulimit -v)" in page
    (alert,) = [event for event in found if isinstance(event, Alert)]
    assert (alert.level, alert.rule, alert.step) == ("error", "out of memory", 2)


def test_torch_on_the_cpu_names_the_layer(tmp_path: Path) -> None:
    errors = ended(tmp_path, TORCH)
    assert "DefaultCPUAllocator" in errors
    text = wait_for_report(only_run(tmp_path))
    assert text.startswith("# Out of memory on the host after step 0, 32.0 GiB requested")
    assert "It happened in the forward pass, layer: 1.0 (Greedy)." in text
    (failure,) = [e for e in only_run(tmp_path).events() if isinstance(e, OutOfMemory)]
    assert failure.requested == 2**35
    assert failure.free < 8 * 1024**3
    assert failure.free <= failure.free_after


IN_A_WORKER = """
    import resource
    import torch
    import memlog

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            resource.setrlimit(resource.RLIMIT_AS, (8 * 1024**3, 8 * 1024**3))
            return torch.ones(2**33)

    memlog.init("local", finish_timeout=60)
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
        pass
"""


def test_a_worker_is_named_and_the_trainers_room_is_not(tmp_path: Path) -> None:
    assert "DefaultCPUAllocator" in ended(tmp_path, IN_A_WORKER)
    text = wait_for_report(only_run(tmp_path))
    title = text.partition("\n")[0]
    assert title.startswith(
        "# Out of memory in DataLoader worker process 0 before the end of the first step"
    )
    assert title.endswith(", 32.0 GiB requested")
    assert "| free |" not in text
    assert "num_workers=0" in text
    (failure,) = [e for e in only_run(tmp_path).events() if isinstance(e, OutOfMemory)]
    assert (failure.free, failure.limited_by) == (None, None)


KILLED_WORKER = """
    import os
    import signal
    import torch
    import memlog

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGBUS)

    memlog.init("local", finish_timeout=60)
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
        pass
"""


def test_a_killed_worker_is_reported(tmp_path: Path) -> None:
    assert "killed by signal" in ended(tmp_path, KILLED_WORKER)
    text = wait_for_report(only_run(tmp_path))
    title = r"# DataLoader worker \(pid \d+\) was killed because memory ran out before the end of the first"
    assert re.match(title, text)
    assert "num_workers=0" in text


def test_a_thread_that_finishes_the_run_as_failed_gets_a_report(tmp_path: Path) -> None:
    def train() -> None:
        try:
            bytearray(2**60)
        except MemoryError:
            memlog.finish("failed")

    memlog.init("local", dir=tmp_path).step()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    text = wait_for_report(only_run(tmp_path))
    assert text.startswith("# Out of memory on the host after step 0\n")


def test_a_failure_that_the_program_survives_is_no_failed_run(tmp_path: Path) -> None:
    memlog.init("local", dir=tmp_path)
    try:
        bytearray(2**60)
    except MemoryError:
        memlog.finish()
    kinds = {type(event) for event in only_run(tmp_path).events()}
    assert OutOfMemory in kinds
    assert not kinds & {Alert, Artifact}


def test_an_error_of_another_kind_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), memlog.init("local", dir=tmp_path):
        raise RuntimeError("shapes do not match")
    kinds = {type(event) for event in only_run(tmp_path).events()}
    assert not kinds & {OutOfMemory, Alert, Artifact}


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_group_that_is_killed_is_explained(tmp_path: Path) -> None:
    """A shell's or a scheduler's `kill -9 -GROUP` kills the trainer and its children."""
    program = (
        "import os, subprocess, sys\nos.setsid()\nworker = subprocess.Popen(['sleep', '120'])"
        + textwrap.dedent(FOREVER).replace("print(helper", "print(worker.pid, helper")
    )
    with child(tmp_path, program) as process:
        worker, _ = map(int, process.stdout.readline().split())
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    text = wait_for_report(only_run(tmp_path))
    assert text.startswith("# Ended unexpectedly")
    assert "Nothing points to memory" in text
    assert "What would help" not in text
    assert "This report is by memlog's helper process" in text
    assert "after step 29\n" in text
    assert "| 29 | " in text
    assert not alive(worker)


IN_A_TRACKER = """
    import resource
    import torch
    import memlog

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.grow = torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.grow(x)

    torch.set_num_threads(1)
    model = Model()
    memlog.init("mlflow", name="own", project="p", model=model, layers=True, finish_timeout=120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 1024**3, 8 * 1024**3))
    for size in (8, 8, 2**26):
        model(torch.ones(size, 64)).sum().backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("ready_store")
def test_a_run_that_memlog_opened_has_failed_in_mlflow_and_has_the_files(tmp_path: Path) -> None:
    process = user_program.start(IN_A_TRACKER, tmp_path, OMP_NUM_THREADS="1")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1, errors
    assert "DefaultCPUAllocator" in errors
    wait_until_delivered(tmp_path / "memlog_runs")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'p'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.tags["memlog.alert.level"] == "error"
    names = {
        file.path.rpartition("/")[2]
        for kind in ("postmortem", "flamegraph")
        for file in client.list_artifacts(run.info.run_id, f"memlog/artifacts/{kind}")
    }
    assert names == {"postmortem.md", "worst-step.html", "worst-step.speedscope.json.gz"}
    text = wait_for_report(only_run(tmp_path / "memlog_runs"))
    assert "16.0 GiB requested" in text
    assert "From the newest traced step, step 0 (dispatch), at its peak of" in text
    assert "`memlog open out/worst-step.speedscope.json.gz`" in text


def test_a_kept_snapshot_is_what_memlog_and_the_public_page_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    taken = device_snapshots.training()
    for history in taken["device_traces"]:
        for entry in history:
            del entry["frames"]  # as CUDA's history has it without stacks
    artifact = keep_snapshot(run, taken)
    assert (artifact.name, artifact.kind) == ("out-of-memory.pickle", "snapshot")
    read = read_snapshot(run.path / artifact.path)
    assert all("frames" in entry for history in read["device_traces"] for entry in history)
    assert snapshot_graph(read, "s").document["profiles"]


ON_A_GPU = """
    import torch
    import memlog

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(context, x, backward):
            context.backward = backward
            return x if backward else x.new_zeros(2**36)

        @staticmethod
        def backward(context, gradient):
            return gradient.new_zeros(2**36), None

    class Layer(torch.nn.Module):
        def forward(self, x):
            return Greedy.apply(x, {in_backward})

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Layer()).cuda()
    session = memlog.init("local", model=model, layers=True, finish_timeout=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.ones(4, device="cuda")).sum().backward()
    optimizer.step()
    session.snapshot()   # the failing step is traced
    model(torch.ones(4, device="cuda")).sum().backward()
"""


@pytest.mark.cuda
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_device_names_the_layer_and_leaves_a_snapshot(tmp_path: Path, in_backward: bool) -> None:
    errors = ended(tmp_path, ON_A_GPU.format(in_backward=in_backward))
    assert "OutOfMemoryError" in errors
    run = only_run(tmp_path)
    text = wait_for_report(run)
    title = "# Out of memory on cuda0 after step 0, 256.0 GiB requested: the whole device has only "
    assert text.startswith(title)
    where = "the backward pass, layer: unknown, in" if in_backward else "the forward pass, layer: 1"
    assert where in text
    assert "More is in `out-of-memory.pickle`" in text
    snapshot = read_snapshot(run.artifacts / "out-of-memory.pickle")
    actions = {entry["action"] for entry in snapshot["device_traces"][0]}
    assert {"alloc", "oom"} <= actions
    assert snapshot_graph(snapshot, "s").document["profiles"]


def test_sync_explains_where_the_helper_died_too(tmp_path: Path) -> None:
    with child(tmp_path, FOREVER) as process:
        helper = int(process.stdout.readline())
        os.kill(helper, signal.SIGKILL)
        process.kill()
    run = only_run(tmp_path)
    assert not run.artifacts.exists()
    for _ in range(2):
        CliRunner().invoke(sync, [run.id, "--dir", str(tmp_path)])
    text = wait_for_report(run)
    assert "This report is by `memlog sync`" in text
    assert len([event for event in run.events() if isinstance(event, Alert)]) == 1
