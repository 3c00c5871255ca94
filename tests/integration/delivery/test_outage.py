"""A tracker that goes away and comes back loses no point: a real ``mlflow server`` on SQLite."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import child
from support.child import kill_helper
from support.faults import FINE, Fault, Proxy
from support.mlflow_server import MlflowServer, running_mlflow_server
from support.outages import (
    BLOCKED,
    FINISH_TIMEOUT,
    OWN_RUN,
    SLOW,
    assert_mlflow_has_everything_once,
    newest_run,
    stop,
    training,
    wait_until_it_goes_on,
    wait_until_unreachable,
)
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

from memlog.journal import find_run, list_runs
from memlog.reports import summarize

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with running_mlflow_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[Proxy]:
    """A proxy in front of the server. It is down, like an absent server, until a test starts it."""
    made = Proxy(server.url)
    yield made
    made.stop()


JOINED = """
    import sys
    import time
    from pathlib import Path

    import mlflow
    import memlog

    session = memlog.init("mlflow", dir="runs", finish_timeout=120)
    with mlflow.start_run() as run:
        print(run.info.run_id, flush=True)
        longest, step = 0.0, 0
        while not Path("stop").exists():
            begun = time.perf_counter()
            session.step()
            longest = max(longest, time.perf_counter() - begun)
            step += 1
            time.sleep(0.005)
    print(longest, step)
"""


@pytest.mark.seed(251)
def test_a_server_killed_in_mid_run_and_started_again_has_every_point(
    tmp_path: Path, server: MlflowServer
) -> None:
    with training(JOINED, tmp_path, MLFLOW_TRACKING_URI=server.url) as process:
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        wait_until_it_goes_on(tmp_path, "mlflow")
        server.kill()
        wait_until_unreachable(tmp_path, "mlflow", "refused")
        server.start()
        (tmp_path / "stop").touch()
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    longest, steps = output.splitlines()[-1].split()
    print(f"longest publish {float(longest) * 1000:.2f} ms in {steps} steps")
    assert float(longest) < BLOCKED
    assert rows_in_mlflow(server.url, run_id) == rows_of(plan_of(newest_run(tmp_path)))


TROUBLES = (
    (Fault(status=500), "answers 500"),
    (Fault(status=503), "answers 503"),
    # MLflow's own basic-auth app leaves /health open to all, too.
    (Fault(status=401, hits=lambda path: "/api/" in path), "refuses the credentials"),
    # The server carries out the request although its answer is lost.
    (
        Fault(loses_answer=True, hits=lambda path: path.endswith("/log-batch")),
        "connection was closed",
    ),
)


def test_a_server_in_every_kind_of_trouble_has_everything_once(
    tmp_path: Path, proxy: Proxy
) -> None:
    """One fault follows another, from before the run until after its end. Then all data must arrive."""
    with training(OWN_RUN, tmp_path, "mlflow", MLFLOW_TRACKING_URI=proxy.url) as process:
        wait_until_unreachable(tmp_path, "mlflow", "refused")
        proxy.fault = Fault(loses_answer=True, hits=lambda path: path.endswith("/runs/create"))
        proxy.start()
        wait_until_unreachable(tmp_path, "mlflow", "connection was closed")
        proxy.fault = FINE
        wait_until_it_goes_on(tmp_path, "mlflow")
        for trouble, because in TROUBLES:
            proxy.fault = trouble
            wait_until_unreachable(tmp_path, "mlflow", because)
            proxy.fault = FINE
            wait_until_it_goes_on(tmp_path, "mlflow")
        proxy.fault = Fault(delay=SLOW)
        wait_until_it_goes_on(tmp_path, "mlflow")  # a slow server does not count as unreachable
        proxy.fault = Fault(status=403)
        wait_until_unreachable(tmp_path, "mlflow", "refuses the credentials (403)")
        printed = stop(process, tmp_path)
    assert f"delivering the last points (at most {FINISH_TIMEOUT:g} s)" in printed.errors
    assert "not everything is delivered (mlflow: " in printed.errors
    shown = child.memlog("show", "latest", "--all", "--dir", "runs", directory=tmp_path)
    assert "refuses the credentials" in shown
    proxy.fault = FINE
    assert_mlflow_has_everything_once(tmp_path, MLFLOW_TRACKING_URI=proxy.url)


NEVER_REACHED = """
    import sys
    import mlflow
    import memlog

    mlflow.set_tracking_uri(sys.argv[1])
    with memlog.init("mlflow", dir="runs", finish_timeout=600) as session:
        for _ in range(50):
            session.step()
"""
"""Script that the test would kill if ``finish`` waited for a server that does not answer."""


def test_a_server_that_was_never_up_has_everything_after_a_sync(
    tmp_path: Path, proxy: Proxy
) -> None:
    process = child.start(NEVER_REACHED, tmp_path, proxy.url)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    run = find_run(tmp_path / "runs", "latest")
    assert "not everything is delivered (mlflow: " in errors
    assert f"`memlog sync {run.id} --dir {run.path.parent}` delivers the rest" in errors
    kill_helper(run)
    proxy.start()
    # The command gets no address; the script has the address in its code.
    printed = child.memlog("sync", "latest", "--dir", "runs", directory=tmp_path)
    own = wait_until_delivered(tmp_path / "runs").own_run
    assert own is not None
    assert (own.run_id in printed, proxy.url in printed) == (True, True)
    assert rows_in_mlflow(proxy.url, own.run_id) == rows_of(plan_of(run))


def test_sync_takes_over_from_a_helper_that_waits(tmp_path: Path, proxy: Proxy) -> None:
    """The helper, which would try for an hour, ends. Every point arrives one time."""
    script = ABSENT.replace('"linger": 2', '"linger": 3600').replace("ENDS", "")
    process = child.start(script, tmp_path, MLFLOW_TRACKING_URI=proxy.url)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    reason = f"MLflow at {proxy.url} does not answer (connection refused)"
    wait_until_unreachable(tmp_path, "mlflow", reason)
    helper = int(output.split()[1])
    assert child.lives(helper)
    proxy.start()
    printed = child.memlog("sync", "latest", "--dir", "runs", directory=tmp_path)
    assert "points delivered" in printed or "left to deliver" in printed
    own = wait_until_delivered(tmp_path / "runs").own_run
    assert own is not None
    run = find_run(tmp_path / "runs", "latest")
    assert rows_in_mlflow(proxy.url, own.run_id) == rows_of(plan_of(run))
    deadline = time.monotonic() + 60
    while child.lives(helper):
        assert time.monotonic() < deadline, "the helper has not left"
        time.sleep(0.05)


ABSENT = """
    import sys

    import memlog

    def begin():
        settings = {"memlog": {"bind_grace": 0, "linger": 2}}
        session = memlog.init("mlflow", dir="runs", finish_timeout=1, config=settings)
        print("helper", session._live._helper.pid, flush=True)
        return session

    session = begin()
    for _ in range(50):
        session.step()
    ENDS
"""
ENDINGS = {
    "without finish": ("", 0),
    "with an error": ("raise ValueError", 1),
    "by sys.exit": ("sys.exit(3)", 3),
    "as a notebook's cell that is run again": ("begin().step()", 0),
}


def test_a_program_ends_and_so_does_its_helper_where_the_server_is_absent(
    tmp_path: Path, proxy: Proxy
) -> None:
    """A program ends in each of several ways. All programs run at once, because they mostly wait."""
    programs = []
    for how, (ends, code) in ENDINGS.items():
        (folder := tmp_path / how).mkdir()
        script = ABSENT.replace("ENDS", ends)
        process = child.start(script, folder, MLFLOW_TRACKING_URI=proxy.url)
        programs.append((process, folder, code))
    for process, folder, code in programs:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        assert "not everything is delivered after 1 s" in errors
        helpers = [int(line.split()[1]) for line in output.splitlines() if "helper" in line]
        deadline = time.monotonic() + 60
        while any(child.lives(pid) for pid in helpers):
            assert time.monotonic() < deadline, "a helper outlives its time"
            time.sleep(0.05)
        runs = list_runs(folder / "runs")
        assert len(runs) == len(helpers)
        assert all(summarize(run).status != "killed" for run in runs)
