"""A tracker that goes away and comes back costs nothing."""

import time
from pathlib import Path

import pytest
from support import child
from support.child import kill_helper
from support.mlflow_server import MlflowServer
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

from memlog.journal import find_run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]

TRAINER = """
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
def test_a_server_killed_in_mid_run_and_started_again_has_every_point(tmp_path: Path) -> None:
    server = MlflowServer(tmp_path)
    server.start()
    try:
        process = child.start(TRAINER, tmp_path, MLFLOW_TRACKING_URI=server.url)
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        wait_for_points(server.url, run_id)
        server.kill()
        time.sleep(3)  # the trainer publishes some hundred steps meanwhile
        server.start()
        (tmp_path / "stop").touch()
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        longest, steps = output.splitlines()[-1].split()
        print(f"longest publish {float(longest) * 1000:.2f} ms in {steps} steps")
        run = find_run(tmp_path / "runs", "latest")
        assert rows_in_mlflow(server.url, run_id) == rows_of(plan_of(run))
    finally:
        server.kill()


def wait_for_points(uri: str, run_id: str) -> None:
    """Until the first points have arrived: the outage is then in mid-run."""
    deadline = time.monotonic() + 120
    while not rows_in_mlflow(uri, run_id):
        assert time.monotonic() < deadline, "no point arrived"
        time.sleep(0.5)


NEVER_REACHED = """
    import sys
    import mlflow
    import memlog

    mlflow.set_tracking_uri(sys.argv[1])
    with memlog.init("mlflow", dir="runs", finish_timeout=3) as session:
        for _ in range(50):
            session.step()
"""


def test_a_server_that_was_never_up_has_everything_after_a_sync(tmp_path: Path) -> None:
    server = MlflowServer(tmp_path)
    child.run(NEVER_REACHED, tmp_path, server.url)
    run = find_run(tmp_path / "runs", "latest")
    kill_helper(run)
    server.start()
    try:
        # From a shell that knows nothing of the address that the script had in its code.
        said = child.memlog("sync", "latest", "--dir", "runs", directory=tmp_path)
        own = wait_until_delivered(tmp_path / "runs").own_run
        assert own is not None
        assert (own.run_id in said, server.url in said) == (True, True)
        assert rows_in_mlflow(server.url, own.run_id) == rows_of(plan_of(run))
    finally:
        server.kill()
