"""W&B online that goes away, and comes back: the real wandb against a double of its server."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import child
from support.child import kill_helper
from support.faults import FINE, Fault
from support.outages import (
    BLOCKED,
    FINISH_TIMEOUT,
    NOTES,
    OWN_RUN,
    SLOW,
    newest_run,
    stop,
    training,
    wait_for_state,
    wait_until_unreachable,
)
from support.truth import plan_of
from support.wandb_server import HeldRun, WandbServer

from memlog.journal import RunDirectory

pytestmark = [pytest.mark.integration, pytest.mark.slow]

Points = Counter[tuple[str, int, float]]
"""Number of copies of each point in W&B, by name, step and value."""


@pytest.fixture
def server() -> Iterator[WandbServer]:
    """A server that is down at first. Its address never changes."""
    made = WandbServer()
    made.start()
    made.stop()
    yield made
    made.stop()


def planned(run: RunDirectory) -> Points:
    return Counter((point.name, point.index, point.value) for point in plan_of(run, "full"))


def received(held: HeldRun) -> Points:
    return Counter(
        (name, int(row["memlog/step"]), value)
        for row in held.rows
        for name, value in row.items()
        if name.startswith(("memory/", "memlog/")) and name != "memlog/step"
    )


def rows_of(server: WandbServer) -> int:
    return sum(len(run.rows) for run in server.runs.values())


def wait_for(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_rows(server: WandbServer) -> None:
    """Wait until more rows have arrived than at the call."""
    before = rows_of(server)
    wait_for(lambda: rows_of(server) > before)


def strike(server: WandbServer, fault: Fault) -> None:
    """Let a fault strike an upload of rows, and then end the fault."""
    server.struck.clear()
    server.fault = fault
    wait_for(lambda: any("file_stream" in path for path in server.struck))
    server.fault = FINE


def assert_everything_is_there(
    directory: Path, server: WandbServer, *, times: int = 1, rows_alone: bool = False
) -> None:
    """Wait for the end of delivery, and check that the run in W&B has all of the journal.

    Args:
        directory: Folder in which the script ran.
        server: The double of W&B's server.
        times: Maximum number of copies of each point and of the alert.
        rows_alone: True if the script has neither an alert nor a file.
    """
    wait_for_state(directory, "wandb", lambda state: state.stage == "done", 150)
    (held,) = server.runs.values()
    got, wanted = received(held), planned(newest_run(directory))
    assert got.keys() == wanted.keys()
    assert all(got[point] in range(count, count * times + 1) for point, count in wanted.items())
    assert (held.complete, held.exit_code) == (True, 0)
    if rows_alone:
        return
    assert {alert["title"] for alert in server.alerts} == {"Host memory"}
    assert len(server.alerts) <= times
    pull = ("pull", held.name, "--backend", "wandb", "-o", "pulled")
    child.memlog(*pull, directory=directory, **server.environment)
    assert (directory / "pulled" / "notes.txt").read_bytes() == NOTES


def test_an_own_run_gets_through_every_kind_of_trouble(tmp_path: Path, server: WandbServer) -> None:
    with training(OWN_RUN, tmp_path, "wandb", **server.environment) as process:
        wait_until_unreachable(tmp_path, "wandb", "refused")
        server.fault = Fault(status=500)
        server.start()
        wait_until_unreachable(tmp_path, "wandb", "answers 500")
        server.fault = Fault(status=401)
        wait_until_unreachable(tmp_path, "wandb", "wandb login")
        server.fault = Fault(delay=SLOW)
        wait_for_rows(server)
        for status in (500, 503):
            strike(server, Fault(status=status))
            wait_for_rows(server)
        server.stop()
        heard = stop(process, tmp_path)
    assert f"delivering the last points (at most {FINISH_TIMEOUT:g} s)" in heard.errors
    # wandb's own client still waits for the server.
    assert "not everything is delivered" in heard.errors
    server.start()
    assert_everything_is_there(tmp_path, server)


def test_a_server_that_refuses_for_a_while_in_mid_run_has_everything(
    tmp_path: Path, server: WandbServer
) -> None:
    server.start()
    with training(OWN_RUN, tmp_path, "wandb", **server.environment) as process:
        wait_for_rows(server)
        strike(server, Fault(status=403))
        stop(process, tmp_path)
    assert_everything_is_there(tmp_path, server, times=2)


ROWS_ALONE = "\n".join(
    line for line in OWN_RUN.splitlines() if not re.search("save_artifact|publish", line)
)
"""Script without alert and file: if an alert waits for the server, wandb ends later than its time limit."""


def test_an_upload_that_was_given_up_is_made_good_by_the_helper(
    tmp_path: Path, server: WandbServer
) -> None:
    server.start()
    environment = {**server.environment, "WANDB_FINISH_TIMEOUT": "2"}
    with training(ROWS_ALONE, tmp_path, "wandb", **environment) as process:
        wait_for_rows(server)
        server.stop()
        stop(process, tmp_path)
    # The error is that of a new sink, or that of wandb's process, which still waits to upload the report.
    wait_until_unreachable(tmp_path, "wandb", "not available")
    server.start()
    assert_everything_is_there(tmp_path, server, times=2, rows_alone=True)


def test_what_a_killed_helper_left_is_brought_by_sync(tmp_path: Path, server: WandbServer) -> None:
    server.start()
    with training(OWN_RUN, tmp_path, "wandb", **server.environment) as process:
        wait_for_rows(server)
        server.stop()
        stop(process, tmp_path)
    kill_helper(newest_run(tmp_path))
    server.start()
    child.memlog("sync", "latest", "--dir", "runs", directory=tmp_path, **server.environment)
    assert_everything_is_there(tmp_path, server, times=2)


IN_PROCESS = """
    import sys
    import time
    from pathlib import Path

    import wandb
    import memlog
    from memlog.events import Alert, now_us

    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    run = wandb.init(project="p", settings=quiet)
    session = memlog.init("wandb", dir="runs", finish_timeout=3)
    longest, step = 0.0, 0
    while not Path("stop").exists():
        begun = time.perf_counter()
        session.step()
        run.log({"loss": step}, step=step)
        if step == 100:
            Path("down").touch()
        if Path("is down").exists() and not Path("notes.txt").exists():
            Path("notes.txt").write_text("what is to be kept " * 9)
            session.save_artifact("notes.txt", "report")
            session.publish(Alert(now_us(), step, "error", "host.rss > 1 GiB", "Host memory", "much"))
        longest = max(longest, time.perf_counter() - begun)
        step += 1
        time.sleep(0.01)
    begun = time.perf_counter()
    session.finish()
    finish = time.perf_counter() - begun
    print(longest, step, finish, run.id, flush=True)
    Path("finished").touch()
    run.finish()
"""


def test_writing_to_a_users_run_whose_server_is_down_slows_nothing(
    tmp_path: Path, server: WandbServer
) -> None:
    server.start()
    with training(IN_PROCESS, tmp_path, **server.environment) as process:
        wait_for((tmp_path / "down").exists)
        wait_for_rows(server)
        server.stop()
        (tmp_path / "is down").touch()
        wait_for((tmp_path / "notes.txt").exists)
        time.sleep(2)  # meanwhile the trainer makes steps
        (tmp_path / "stop").touch()
        wait_for((tmp_path / "finished").exists)
        server.start()
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    longest, steps, finish, run_id = output.splitlines()[-1].split()
    print(f"longest of {steps} steps {float(longest) * 1000:.1f} ms, finish {finish} s")
    assert float(longest) < BLOCKED
    assert float(finish) < FINISH_TIMEOUT + 2 * BLOCKED
    written = server.runs[run_id].rows
    assert [row["loss"] for row in written if "loss" in row] == list(range(int(steps)))
    arguments = ("latest", "--dir", "runs")
    shown = child.memlog("show", *arguments, directory=tmp_path)
    if "`memlog sync" not in shown:  # the file arrived when the server came back
        assert {alert["title"] for alert in server.alerts} == {"Host memory"}
        return
    child.memlog("sync", *arguments, directory=tmp_path, **server.environment)
    (beside,) = (run for run in server.runs.values() if run.name != run_id)
    assert received(beside).keys() == planned(newest_run(tmp_path)).keys()
    assert {alert["title"] for alert in server.alerts} == {"Host memory"}
    assert beside.name in {held.run for held in server.artifacts if held.type == "report"}
