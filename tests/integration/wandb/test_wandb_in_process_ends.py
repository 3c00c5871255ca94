"""Ends of a program with a W&B run of the user's: what waits arrives then, or with `memlog sync`."""

from pathlib import Path

import pytest
from support import child
from support.in_process import PREAMBLE, USERS, assert_every_step_is_there, recorded, sync_offline
from support.truth import plan_of
from support.wandb_file import find_runs, read_only_run, read_run

from memlog.reports import summarize

pytestmark = pytest.mark.integration


def test_values_that_wait_at_exit_and_the_whole_series_arrive_without_finish(
    tmp_path: Path,
) -> None:
    """An unwrapped script: memlog's handler at exit runs before wandb's, though it was registered first."""
    process = child.start(PREAMBLE + USERS["with sparse step=, twice a step"], tmp_path, "--memlog")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors.count("share a row of run") == 1
    held, run = read_only_run(tmp_path), recorded(tmp_path)
    assert held.rows[-1]["memlog/step"] == 199
    artifact, report = sorted(held.artifacts, key=lambda held: held["type"], reverse=True)
    assert (artifact["type"], report["type"]) == ("series", "report")
    (file,) = artifact["files"].values()
    lines = Path(file).read_text().splitlines()
    assert lines[0] == "axis,index,time_us,name,value"
    rows = sorted(tuple(line.split(",")) for line in lines[1:])
    assert rows == sorted(
        (p.axis, str(p.index), str(p.time_us), p.name, repr(p.value)) for p in plan_of(run, "full")
    )
    (delivery,) = summarize(run).health.delivered.values()
    assert (delivery.stage, delivery.problem) == ("done", None)
    assert [(tracked.id, tracked.own) for tracked in delivery.runs] == [(held.run_id, False)]


def test_rows_that_wandb_copies_from_tensorboard_are_not_called_sparse(tmp_path: Path) -> None:
    script = """
    from torch.utils.tensorboard import SummaryWriter

    run = start(sync_tensorboard=True)
    writer = SummaryWriter("tb")
    for s in steps(20):
        writer.add_scalar("loss", 1.0, s)
    writer.close()
    memlog.finish()
    run.finish()
    """
    process = child.start(PREAMBLE + script, tmp_path, "--memlog")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors.count("sync_tensorboard=True") == 1, errors
    assert "share a row" not in errors
    assert "The artifact series-" in errors


def test_steps_after_the_users_run_are_made_good_beside_it(tmp_path: Path) -> None:
    process = child.start(
        PREAMBLE
        + """
    run = start()
    for s in steps(100):
        if s % 50 == 0:
            run.log({"loss": s}, step=s)
    run.finish()
    for s in steps(5):
        pass
    """,
        tmp_path,
        "--memlog",
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "memlog sync" in errors
    users = read_only_run(tmp_path)
    assert [row["loss"] for row in users.users_rows()] == [0, 50]
    shown = " ".join(child.memlog("show", "latest", "--all", directory=tmp_path).split())
    assert "delivers the whole series to a new run" in shown
    before = find_runs(tmp_path)[0].read_bytes()
    output = sync_offline(tmp_path)
    assert "points delivered" in output
    first, second = find_runs(tmp_path)
    assert first.read_bytes() == before
    made = read_run(second)
    assert (made.group, made.project, made.job_type) == (users.run_id, users.project, "memlog")
    assert made.exit_code == 0
    assert_every_step_is_there(made, recorded(tmp_path))
    shown = child.memlog("show", "latest", "--all", directory=tmp_path)
    assert "✓" in shown or "done" in shown
    assert "nothing" in sync_offline(tmp_path)
    assert len(find_runs(tmp_path)) == 2
