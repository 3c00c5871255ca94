"""W&B's runs that are offline, disabled or not `wandb.run`, and memlog's lines about them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import child
from support.in_process import PREAMBLE
from support.wandb_file import find_runs, read_only_run, read_run

pytestmark = pytest.mark.integration

LOOP = """
    for s in steps(20):
        run.log({"loss": s}, step=s)
"""


def train(script: str, directory: Path, **environment: str) -> str:
    """Run a script and return what it printed on standard error."""
    process = child.start(PREAMBLE + script, directory, "--memlog", **environment)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return errors


def show(directory: Path) -> str:
    return " ".join(child.memlog("show", "latest", "--all", directory=directory).split())


def test_an_offline_run_is_reported_to_be_in_its_folder_with_its_files(tmp_path: Path) -> None:
    train("    run = start(id='mine')" + LOOP, tmp_path)
    (folder,) = (path.parent for path in find_runs(tmp_path))
    shown = show(tmp_path)
    assert f"run mine, offline in ./wandb/{folder.name}" in shown
    assert f"`wandb sync ./wandb/{folder.name}` uploads it" in shown
    assert "http" not in shown
    pulled = subprocess.run(
        [sys.executable, "-m", "memlog", "pull", "latest", "--backend", "wandb", "-o", "out"],
        cwd=tmp_path,
        env={
            **os.environ,
            "WANDB_MODE": "offline",
            "WANDB_BASE_URL": "http://127.0.0.1:1",
            "NETRC": str(tmp_path / "none"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert pulled.returncode == 1
    assert f"omit --backend to get them from this machine, or call `wandb sync {folder}` first" in (
        pulled.stderr
    )
    assert "WANDB_MODE" not in pulled.stderr
    assert len(pulled.stderr.strip().splitlines()) == 1


def test_nothing_is_reported_to_be_in_a_disabled_run(tmp_path: Path) -> None:
    errors = train("    run = wandb.init(mode='disabled', project='p')" + LOOP, tmp_path)
    assert "disabled, so only memlog's folder" in errors
    assert "artifact" not in errors
    shown = show(tmp_path)
    assert "0 points: run" in shown
    assert "disabled: the tracker stores nothing of it" in shown
    assert "http" not in shown
    assert "sync" not in shown
    assert find_runs(tmp_path) == []


def test_the_only_open_run_is_joined_although_it_is_not_wandb_run(tmp_path: Path) -> None:
    errors = train(
        "    run = start(reinit='create_new')\n    assert wandb.run is None" + LOOP, tmp_path
    )
    held = read_only_run(tmp_path)
    assert held.users_rows() == [{"loss": s, "_step": s} for s in range(20)]
    assert held.memlogs_rows()
    assert "wandb.run" not in errors


def test_which_of_several_such_runs_is_meant_is_asked_in_one_line(tmp_path: Path) -> None:
    errors = train(
        "    run = start(reinit='create_new')\n    other = start(reinit='create_new')" + LOOP,
        tmp_path,
        WANDB_MODE="offline",
    )
    assert errors.count("2 W&B runs are open and none is wandb.run") == 1
    held = [read_run(path) for path in find_runs(tmp_path)]
    assert [bool(run.memlogs_rows()) for run in held if run.job_type != "memlog"] == [False, False]
