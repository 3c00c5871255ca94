"""TensorBoard's integration with the real writer of torch, in programs of a user's, some of them killed."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import child
from support.event_files import events_in, texts_in
from support.mlflow_server import free_port
from support.truth import plan_of

from memlog.journal import RunDirectory, find_run, list_runs

pytestmark = pytest.mark.integration

TRIALS = """
    import os
    import torch
    from torch.utils.tensorboard import SummaryWriter

    import memlog

    session = memlog.init("tensorboard", dir="runs", alerts=["host.rss > 1 MiB"], finish_timeout=60)
    os.mkdir("elsewhere")
    for trial in range(2):
        writer = SummaryWriter(f"trials/{trial}")
        for step in range(20):
            session.step()
            writer.add_scalar("loss", 1 / (step + 1), step)
            writer.add_scalars("parts", {"a": step}, step)
        writer.flush()
        os.chdir("elsewhere" if trial == 0 else "..")
        if trial == 0:
            os.symlink("../trials", "trials")
    session.join_run("tensorboard", "elsewhere/trials/joined")
    os.mkdir("trials/joined")
    for step in range(5):
        session.step()
    memlog.finish()
"""

KILLED = """
    import os
    import torch
    from torch.utils.tensorboard import SummaryWriter

    import memlog

    session = memlog.init("tensorboard", dir="runs")
    writer = SummaryWriter("logs")
    step = 0
    while True:
        session.step()
        step += 1
        if step % 50 == 0:
            print(session._live._helper.pid, flush=True)
"""


def stored(folder: Path) -> Counter[tuple[str, int, float]]:
    """memlog's rows in a folder."""
    reader = events_in(folder)
    return Counter(
        (tag, event.step, event.value)
        for tag in reader.Tags()["scalars"]
        if tag.startswith("mem")
        for event in reader.Scalars(tag)
    )


def planned(run: RunDirectory) -> Counter[tuple[str, int, float]]:
    """Return the journal's points, with the digits that TensorBoard keeps."""
    return Counter(
        (point.name, point.index, float(np.float32(point.value)))
        for point in plan_of(run, "bucketed")
    )


@pytest.mark.seed(253)
def test_each_trial_has_its_memory_beside_its_scalars(tmp_path: Path) -> None:
    child.run(TRIALS, tmp_path)
    steps = {}
    for trial in ("0", "1", "joined"):
        rows = stored(tmp_path / "trials" / trial)
        assert set(rows.values()) == {1}
        steps[trial] = sorted(step for name, step, _ in rows if name == "memory/host/rss_mib")
    assert steps == {"0": list(range(20)), "1": list(range(20)), "joined": list(range(5))}
    for trial in ("0", "1"):
        reader = events_in(tmp_path / "trials" / trial)
        losses = [(event.step, event.value) for event in reader.Scalars("loss")]
        assert losses == [(step, float(np.float32(1 / (step + 1)))) for step in range(20)]
    assert len(texts_in(tmp_path / "trials" / "0", "memlog/alerts/host.rss > 1 MiB")) == 1
    ((_, (text,)),) = texts_in(tmp_path / "trials" / "joined", "memlog/files/report.html")
    assert f"in the folder of memlog's run {find_run(tmp_path / 'runs', 'latest').id}" in text


def test_a_killed_run_is_complete_once_however_often_it_is_synced(tmp_path: Path) -> None:
    process = child.start(KILLED, tmp_path)
    assert process.stdout is not None
    helper = 0
    deadline = time.monotonic() + 60
    while not list((tmp_path / "logs").glob("*memlog*")):
        helper = int(process.stdout.readline())
        assert time.monotonic() < deadline
    for pid in (helper, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    (file,) = (tmp_path / "logs").glob("*memlog*")
    with file.open("ab") as torn:
        torn.write(file.read_bytes()[:9])
    run = find_run(tmp_path / "runs", "latest")
    state = run.delivery / "tensorboard.json"
    before = state.read_bytes() if state.exists() else None
    for attempt in range(2):
        if attempt == 1:  # as if the helper had died before it could save anything
            state.unlink() if before is None else state.write_bytes(before)
        child.memlog("sync", run.id, "--dir", "runs", directory=tmp_path)
        assert stored(tmp_path / "logs") == planned(run)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--port", str(port), "--logdir"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "logs")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield f"http://127.0.0.1:{port}/data/plugin/scalars"
    process.terminate()
    process.wait()


@pytest.mark.slow
def test_the_page_shows_what_the_file_has(tmp_path: Path, page: str) -> None:
    """TensorBoard's default server is another program than its reader, and reads fewer formats."""
    from memlog.sink import Connection, Target
    from memlog.testing.made import points
    from memlog_tensorboard import backend

    sink = backend.open_sink(Target("r", None, connection=Connection(str(tmp_path / "logs"))))
    sink.open()
    sink.log_points(points(20))
    deadline = time.monotonic() + 60
    shown: list[list[float]] = []
    while not shown:
        assert time.monotonic() < deadline
        try:
            answer = httpx.get(f"{page}/scalars?run=memlog-r&tag=memory/host/rss_mib", timeout=5)
            shown = answer.json() if answer.is_success else []
        except httpx.HTTPError:
            time.sleep(0.2)
    assert [(step, value) for _, step, value in shown] == [(p.index, p.value) for p in points(20)]


ROLLOUTS = """
    import sys
    import torch
    {writer}

    import memlog

    first = int(sys.argv[1])
    session = memlog.init("tensorboard", dir="runs", finish_timeout=60)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = SummaryWriter("logs", purge_step=first or None)
    for iteration in range(first // 512, first // 512 + 3):
        writer.add_scalar("episodic_return", 1.0, 512 * iteration + 300)
        for _ in range(16):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        writer.add_scalar("loss", 1.0, 512 * (iteration + 1))
    writer.close()
    memlog.finish()
"""
WRITERS = (
    "from torch.utils.tensorboard import SummaryWriter",
    "from tensorboardX import SummaryWriter",
)


def steps_of(folder: Path, tag: str = "memory/host/rss_mib") -> list[int]:
    return [event.step for event in events_in(folder).Scalars(tag)]


@pytest.mark.parametrize("writer", WRITERS)
def test_steps_go_on_from_the_numbers_at_which_the_user_logs(tmp_path: Path, writer: str) -> None:
    """An agent logs frames: 512 of them for each 16 optimizer steps."""
    child.run(ROLLOUTS.format(writer=writer), tmp_path, "0")
    # memlog sees what the program logs from the first step on.
    first = [*range(16), *range(812, 828), *range(1324, 1340)]
    assert steps_of(tmp_path / "logs") == first
    child.run(ROLLOUTS.format(writer=writer), tmp_path, "1536")
    later = [*range(1340, 1356), *range(2348, 2364), *range(2860, 2876)]
    assert steps_of(tmp_path / "logs") == first + later


def test_epochs_do_not_count_as_steps(tmp_path: Path) -> None:
    program = """
        from torch.utils.tensorboard import SummaryWriter

        import memlog

        session = memlog.init("tensorboard", dir="runs", finish_timeout=60)
        writer = SummaryWriter("logs")
        for epoch in range(3):
            for step in range(10):
                session.step()
            writer.add_scalar("accuracy", 1.0, epoch)
        writer.close()
        memlog.finish()
    """
    child.run(program, tmp_path)
    assert steps_of(tmp_path / "logs") == list(range(30))
    assert "memlog/steps" not in events_in(tmp_path / "logs").Tags()["scalars"]


SEVERAL_AXES = """
    from torch.utils.tensorboard import SummaryWriter

    import memlog

    def megatron(writer, step):
        writer.add_scalar("loss", 1.0, step)
        writer.add_scalar("loss vs samples", 1.0, 256 * (step + 1))

    def parts(writer, step):
        writer.add_scalars("loss", {"a": 1.0, "b": 2.0}, 512 * (step + 1))

    def invalid(writer, step):
        writer.add_scalar("eval", 1.0, -1)
        writer.add_scalar("loss", 1.0, 512 * (step + 1))

    def each_sample(writer, step):
        writer.add_scalar("loss", 1.0, 32 * (step + 1))

    for log, steps in ((megatron, 20), (parts, 20), (invalid, 20), (each_sample, 10_100)):
        session = memlog.init("tensorboard", dir="runs", finish_timeout=120)
        writer = SummaryWriter(f"logs/{log.__name__}")
        for step in range(steps):
            session.step()
            log(writer, step)
        memlog.finish()
        writer.close()
"""


def test_the_users_axis_is_found_among_several(tmp_path: Path) -> None:
    child.run(SEVERAL_AXES, tmp_path)
    logs = tmp_path / "logs"
    assert steps_of(logs / "megatron") == list(range(20))
    # The first call of `add_scalars` opens the writers.
    assert steps_of(logs / "parts") == [0, 1, *range(1024, 20 * 512, 512)]
    assert steps_of(logs / "invalid") == list(range(0, 20 * 512, 512))
    several = steps_of(logs / "each_sample")
    assert several[:10_000] == list(range(0, 320_000, 32))
    assert [step - step % 320 for step in several[10_000:]] == list(range(320_000, 323_200, 320))
    assert len(steps_of(logs / "each_sample", "memlog/steps")) == 9_999 + 10


def test_a_second_upload_keeps_the_users_numbers(tmp_path: Path) -> None:
    child.run(ROLLOUTS.format(writer=WRITERS[0]), tmp_path, "0")
    before = stored(tmp_path / "logs")
    (run,) = list_runs(tmp_path / "runs")
    (state,) = run.path.glob("delivery/tensorboard*.json")
    state.unlink()
    command = (sys.executable, "-m", "memlog", "sync", run.id, "--dir", "runs")
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert stored(tmp_path / "logs") == before
