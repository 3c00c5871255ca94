"""If threads or descriptors run out, or `init` is interrupted, training goes on and nothing is left over."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import child

from memlog.journal import find_run, list_runs
from memlog.reports import summarize

pytestmark = pytest.mark.integration

AT_MOST = 120
"""Maximum seconds that each of these programs runs, also on a busy machine."""

PREFACE = """
    import gc
    import json
    import os
    import resource
    import signal
    import sys
    import threading
    import time

    import psutil

    import memlog

    def descriptors():
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "memlog-alerts":  # it ends when its helper has
                thread.join(30)
        return len(os.listdir("/proc/self/fd"))

    def helpers():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            lives = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
            if not lives:
                break
            time.sleep(0.05)
        return len(lives)

    memlog.init("local", alerts=["host.tree > 900 TiB"], dir="first").finish()
    before = descriptors()
"""

THREADS = """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)  # whom the limit is for
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    for _ in range(3):
        with memlog.init("local", alerts=["host.tree > 900 TiB"], dir="runs") as session:
            for _ in range(10):
                session.step()
        faults = session.health.faults
    print(json.dumps([faults, descriptors() - before, helpers()]))
"""


@pytest.fixture
def for_everybody() -> Iterator[Path]:
    """A folder in which every user can write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_at_the_limit_of_threads_a_run_is_recorded_and_nothing_is_left(for_everybody: Path) -> None:
    """Neither the thread that listens for alerts nor the helper process can start."""
    output = child.run(PREFACE + THREADS, for_everybody, timeout=AT_MOST)
    faults, more, helpers = json.loads(output)
    assert "listening for the helper process's alerts: RuntimeError" in faults
    assert any(cause.startswith("starting the helper process: ") for cause in faults)
    assert (more, helpers) == (0, 0)
    assert [
        (run.status, run.steps) for run in map(summarize, list_runs(for_everybody / "runs"))
    ] == [("finished", 10)] * 3


NO_DESCRIPTOR = """
    import json
    import resource

    from memlog import init

    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, allowed[1]))
    session = init("local", alerts=["host.tree > 900 TiB"], dir="runs")
    resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    session.step()
    session.finish()
    print(json.dumps([session.enabled, session.health.faults]))
"""


def test_without_a_free_descriptor_one_line_tells_the_remedy(tmp_path: Path) -> None:
    """Importing the modules that read descriptors needs a descriptor, too."""
    process = child.start(NO_DESCRIPTOR, tmp_path)
    output, errors = process.communicate(timeout=AT_MOST)
    assert json.loads(output) == [False, {"beginning a run (nothing is recorded): OSError": 1}]
    [line] = errors.splitlines()
    assert "beginning a run (nothing is recorded) failed" in line
    assert "ulimit -n" in line


DESCRIPTORS = """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []
    for limit in range(3, 20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, allowed[1]))
        try:
            session = memlog.init("local", alerts=["host.tree > 900 TiB"], dir="runs")
            session.step()
            session.finish()
            outcome = session.id
        except memlog.MemlogError as error:
            outcome = None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        outcomes.append((limit, outcome))
        helpers()  # what waits for the last one to end holds a descriptor until then
        assert descriptors() == before, (limit, descriptors(), before)
    print(json.dumps([outcomes, helpers()]))
"""


def test_at_the_limit_of_descriptors_nothing_raises_and_nothing_is_left(tmp_path: Path) -> None:
    outcomes, helpers = json.loads(child.run(PREFACE + DESCRIPTORS, tmp_path, timeout=AT_MOST))
    assert helpers == 0
    recorded = [run_id for _, run_id in outcomes if run_id is not None]
    assert outcomes[-1][1] is not None
    assert len(recorded) > len(outcomes) / 2
    runs = {run.id: summarize(run) for run in list_runs(tmp_path / "runs")}
    assert set(runs) == set(recorded)  # no run of a failed `init` is listed
    assert {(run.status, run.steps) for run in runs.values()} == {("finished", 1)}


INTERRUPTED = """
    class TimeUp(Exception):
        pass

    def handler(number, frame):
        raise TimeUp

    signal.signal(signal.SIGUSR1, handler)
    kept = memlog.init("local", dir="runs")

    def interrupting(at):
        # At the calls of memlog's functions; in the moment before a number is known nobody can give it back.
        left = at
        of_files = ("memlog._internal.processes", "memlog._internal.safe_files")
        def trace(frame, event, _):
            nonlocal left
            name = frame.f_globals.get("__name__", "")
            if name.startswith("memlog.") and name not in of_files:
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGUSR1)
        return trace

    kept.step()
    before, at, hit = descriptors(), 1, 0
    while True:
        sys.settrace(interrupting(at))
        try:
            session = memlog.init("local", alerts=["host.tree > 900 TiB"], dir="runs")
            break
        except TimeUp:
            hit += 1
        finally:
            sys.settrace(None)
        after, before = before, descriptors()  # the session before may be over by now
        assert before <= after, (at, before, after)
        at += 1
    session.step()
    session.finish()
    print(json.dumps([hit, session.id, kept.id, helpers()]))
"""


def test_an_init_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    output = child.run(PREFACE + INTERRUPTED, tmp_path, timeout=AT_MOST)
    hit, run_id, kept_id, helpers = json.loads(output)
    assert hit > 100
    assert helpers == 0
    assert {run.id for run in list_runs(tmp_path / "runs")} == {run_id, kept_id}


CANCELLED = """
    import asyncio
    import os
    import signal
    import threading

    import memlog

    def ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)

    async def train():
        with memlog.init("local", dir="runs") as session:
            session.step()
            threading.Timer(0.2, ctrl_c).start()
            await asyncio.sleep(60)

    asyncio.run(train())
"""


def test_ctrl_c_in_a_coroutine_is_ctrl_c(tmp_path: Path) -> None:
    process = child.start(CANCELLED, tmp_path)
    process.communicate(timeout=AT_MOST)
    run = summarize(find_run(tmp_path / "runs", "latest"))
    assert (run.status, run.steps) == ("killed", 1)
