"""Lines on the run: which tracker's run a session joined or opened, and where to look at the end."""

import json
import re
from pathlib import Path

import pytest
from support import child

pytestmark = [pytest.mark.integration]

TRAIN = """
    import sys
    import time

    import memlog

    def train(session, steps=30):
        for _ in range(steps):
            session.step()

    def opened(session, backend):
        from memlog.journal import RunDirectory
        from memlog.journal.delivery_state import UploadState

        while UploadState.load(RunDirectory(session.directory), backend).own_run is None:
            session.step()
            time.sleep(0.05)
        session._live.batches.helper_check_due = 0  # the check of once a second falls into this step
        session.step()
"""
VERDICT = r"memlog: (No growth|Unsure).* peak [\d.]+ MiB( of [\d.]+ GiB)?.*\."
ID = r"run [a-z0-9]{8}"


def lines_of(folder: Path, script: str, **environment: str) -> list[str]:
    """Return memlog's lines on standard error, without the notice that the last points are delivered."""
    process = child.start(TRAIN + script, folder, **environment)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    lines = [line for line in errors.splitlines() if line.startswith("memlog: ")]
    return [line for line in lines if not line.startswith("memlog: delivering the last points")]


@pytest.mark.usefixtures("ready_store")
def test_the_command_that_shows_a_run_is_printed_and_finds_it_by_its_name(tmp_path: Path) -> None:
    """The user's run and one that memlog opens. test_mlflow_uris has the addresses on a server."""
    joined = """
    import mlflow

    session = memlog.init(finish_timeout=120)
    mlflow.start_run(run_name="the-users")
    train(session)
    memlog.finish()
    """
    first, verdict, link = lines_of(tmp_path, joined)
    shows = f"`mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db`"
    assert re.fullmatch(rf"memlog: {ID} joined mlflow run 'the-users': {shows}", first)
    assert re.fullmatch(VERDICT, verdict)
    assert link == f"memlog: mlflow run 'the-users': {shows}"
    opened = """
    session = memlog.init("mlflow", finish_timeout=120, config={"memlog": {"bind_grace": 0}})
    train(session)
    opened(session, "mlflow")
    memlog.finish()
    """
    lines = lines_of(tmp_path, opened)
    second = re.fullmatch(rf"memlog: {ID} opened mlflow run '([\w-]+)': {shows}", lines[0])
    assert second
    assert lines[-1] == f"memlog: mlflow run '{second[1]}': {shows}"
    for name in ("the-users", second[1]):
        assert child.memlog("show", name, directory=tmp_path).count(name) >= 1


def test_an_offline_run_of_wandb_has_the_command_that_uploads_it(tmp_path: Path) -> None:
    script = """
    import wandb

    session = memlog.init(finish_timeout=60)
    run = wandb.init(mode="offline", project="p", name="mine")
    for step in range(20):
        session.step()
        run.log({"loss": 1.0})
    memlog.finish()
    run.finish()
    """
    lines = lines_of(tmp_path, script, WANDB_SILENT="true")
    first = re.fullmatch(rf"memlog: {ID} joined wandb run 'mine': `wandb sync (.*)`", lines[0])
    assert first
    assert Path(first[1]).parent == tmp_path / "wandb"
    assert Path(first[1]).is_dir()
    assert lines[-1] == f"memlog: wandb run 'mine': `wandb sync {first[1]}`"
    assert "mine" in child.memlog("show", "mine", directory=tmp_path)


def test_of_several_ranks_the_first_prints(tmp_path: Path) -> None:
    script = """
    train(memlog.init("local", finish_timeout=60))
    memlog.finish()
    """
    first = lines_of(tmp_path, script, RANK="0", WORLD_SIZE="2")
    assert re.fullmatch(rf"memlog: {ID} is recorded in {tmp_path}/.*: `memlog watch .*`", first[0])
    assert re.fullmatch(VERDICT, first[1])
    assert re.fullmatch(rf"memlog: {ID}: `memlog show [a-z0-9]{{8}}`", first[2])
    assert lines_of(tmp_path, script, RANK="1", WORLD_SIZE="2") == []


def test_the_verdict_is_the_first_line_of_show(tmp_path: Path) -> None:
    script = """
    import torch

    try:
        with memlog.init("local") as session:
            train(session)
            torch.empty(1 << 50, dtype=torch.uint8)
    except RuntimeError:
        pass
    """
    lines = lines_of(tmp_path, script)
    assert lines[-2].startswith(
        "memlog: Out of memory on the host after step 29, 1.0 PiB requested: the whole memory is only "
    )
    assert " No growth: peak" in lines[-2]
    shown = child.memlog("show", "latest", "--json", directory=tmp_path)
    assert lines[-2] == f"memlog: {json.loads(shown)['verdict']}"


@pytest.mark.parametrize("helper", ["answers", "was killed"])
def test_the_last_line_is_the_verdict_of_show_with_a_helper_process_and_without(
    tmp_path: Path, helper: str
) -> None:
    script = f"""
    import os, signal, time

    session, kept = memlog.init("local", finish_timeout=60), []
    for step in range(400):
        session.step()
        kept.append(bytearray(2**20))
    if {helper == "was killed"}:
        os.kill(session._live._helper.pid, signal.SIGKILL)
        time.sleep(0.5)
    memlog.finish()
    """
    lines = lines_of(tmp_path, script)
    verdict = json.loads(child.memlog("show", "latest", "--json", directory=tmp_path))["verdict"]
    assert f"memlog: {verdict}" in lines[-3:]
