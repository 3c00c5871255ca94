"""Shared parts of the tests of tracker outages: a trainer that continues, and its helper's state."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from memlog.journal import RunDirectory, find_run
from memlog.journal.delivery_state import UploadState
from support import child
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

BLOCKED = 2.0
"""Seconds above which a step counts as having waited for a tracker, whose faults last `SLOW` seconds."""
SLOW = 3.0
"""Seconds for which a fault delays a request, longer than a healthy tracker takes."""
FINISH_TIMEOUT = 3.0

OWN_RUN = """
    import sys
    import time
    from pathlib import Path

    import memlog
    from memlog.events import Alert, now_us

    begun = time.perf_counter()
    session = memlog.init(
        sys.argv[1], dir="runs", finish_timeout=FINISH, config={"memlog": {"bind_grace": 0}}
    )
    init = time.perf_counter() - begun
    longest, step = 0.0, 0
    while not Path("stop").exists():
        begun = time.perf_counter()
        session.step()
        longest = max(longest, time.perf_counter() - begun)
        step += 1
        time.sleep(0.01)
    Path("notes.txt").write_text("what is to be kept " * 9)
    session.save_artifact("notes.txt", "report")
    session.publish(Alert(now_us(), step, "error", "host.rss > 1 GiB", "Host memory", "much"))
    begun = time.perf_counter()
    session.finish()
    print(init, longest, step, time.perf_counter() - begun)
""".replace("FINISH", str(FINISH_TIMEOUT))
"""Script that steps until a file named ``stop`` exists, then saves a file, raises an alert and finishes."""


NOTES = b"what is to be kept " * 9


class Printed(NamedTuple):
    """Seconds that `OWN_RUN` has measured and printed itself."""

    init: float
    longest: float
    steps: int
    finish: float
    errors: str
    """Its stderr."""


@contextmanager
def training(
    script: str, directory: Path, *arguments: str, **environment: str
) -> "Iterator[subprocess.Popen[str]]":
    """A running trainer, which is killed at the end of the block."""
    process = child.start(script, directory, *arguments, **environment)
    try:
        yield process
    finally:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            print(*process.communicate())  # why it may have ended early


def stop(process: "subprocess.Popen[str]", directory: Path) -> Printed:
    """End `OWN_RUN`, and check that no part of it waited for the tracker."""
    (directory / "stop").touch()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    init, longest, steps, finish = output.splitlines()[-1].split()
    printed = Printed(float(init), float(longest), int(steps), float(finish), errors)
    print(
        f"init {printed.init:.3f} s, longest of {printed.steps} steps {printed.longest * 1000:.1f} ms, "
        f"finish {printed.finish:.2f} s"
    )
    assert printed.init < BLOCKED
    assert printed.longest < BLOCKED
    assert printed.finish < FINISH_TIMEOUT + 2 * BLOCKED
    return printed


def wait_for_state(
    directory: Path, backend: str, holds: Callable[[UploadState], bool], seconds: float = 60
) -> UploadState:
    """Wait until ``holds`` is true of the newest run's saved upload state, and return it."""
    run = newest_run(directory)
    deadline = time.monotonic() + seconds
    while not holds(state := UploadState.load(run, backend)):
        assert time.monotonic() < deadline, state
        time.sleep(0.05)
    return state


def wait_until_unreachable(directory: Path, backend: str, because: str) -> UploadState:
    def has_met(state: UploadState) -> bool:
        return state.stage == "unreachable" and because in (state.problem or "")

    return wait_for_state(directory, backend, has_met)


def wait_until_it_goes_on(directory: Path, backend: str) -> UploadState:
    """Wait until the uploader has sent more than it had sent at the call."""
    before = _handed_over(UploadState.load(newest_run(directory), backend))
    return wait_for_state(directory, backend, lambda state: _handed_over(state) > before)


def _handed_over(state: UploadState) -> int:
    return state.delivered + state.provisional


def newest_run(directory: Path) -> RunDirectory:
    """The run that a trainer has just begun in ``directory``."""
    deadline = time.monotonic() + 30
    while not list((directory / "runs").glob("*/*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return find_run(directory / "runs", "latest")


def assert_mlflow_has_everything_once(directory: Path, **environment: str) -> None:
    """Wait until memlog's own run in MLflow has all of the journal, and check that memlog has no other."""
    from mlflow import MlflowClient

    own = wait_until_delivered(directory / "runs").own_run
    assert own is not None
    run = newest_run(directory)
    uri = environment["MLFLOW_TRACKING_URI"]
    assert rows_in_mlflow(uri, own.run_id) == rows_of(plan_of(run))
    client = MlflowClient(uri)
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    (held,) = client.search_runs(everywhere, filter_string=f"tags.`memlog.run_id` = '{run.id}'")
    assert (held.info.run_id, held.info.status) == (own.run_id, "FINISHED")
    assert held.data.tags["memlog.alert.count"] == "1"
    pull = ("pull", own.run_id, "--backend", "mlflow", "-o", "pulled")
    child.memlog(*pull, directory=directory, **environment)
    assert (directory / "pulled" / "notes.txt").read_bytes() == NOTES
