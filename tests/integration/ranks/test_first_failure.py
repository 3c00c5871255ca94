"""The run that all ranks share says which rank failed first: real trainings below torchrun, on the CPU."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.mlflow_server import free_port
from support.ranks import only_run, ranks, wait_for_end_of
from support.shared_runs import Told, told_by_all, wait_until, wait_until_over
from support.wandb_server import WandbServer

from memlog.events import Artifact, Finding
from memlog.journal import RunDirectory
from memlog.reports import summarize

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TRAIN = textwrap.dedent("""
    import os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist
    import memlog

    how, backend = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    memlog.init(backend)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []

    def wait_until(is_true):
        while not is_true():
            time.sleep(0.05)

    def has_exit(folder):
        return any(b'["exit"' in each.read_bytes() for each in folder.glob("helper-*"))

    def at_step_20():
        runs = {each.parent for each in Path("memlog_runs").glob("*/rank.json")}
        if how == "memory" and rank == 1 or how == "own" and rank == 0 or how == "all":
            torch.empty(2**46)
        elif how == "raised" and rank == 1:
            raise ValueError("a bad batch")
        elif how in ("killed", "hung") and rank == 1:
            wait_until(lambda: all(list(run.glob("helper-*")) for run in runs))
            if how == "killed":
                os.kill(os.getppid(), signal.SIGSTOP)  # else the launcher may hide the end from memlog
            os.kill(os.getpid(), signal.SIGKILL)
        elif how in ("killed", "hung"):
            wait_until(lambda: any(has_exit(run) for run in runs))
            if how == "killed":
                os.kill(os.getppid(), signal.SIGCONT)
            else:
                Path("alone").touch()
                wait_until(lambda: Path("enough").exists())
        elif how == "interrupt":
            Path(f"ready{rank}").touch()
            time.sleep(60)

    try:
        for step in range(150 if how == "leak" else 24):
            if step == 20:
                at_step_20()
            if how == "leak" and rank == 1:
                kept.append(torch.ones(4, 256, 1024))
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if how == "raised" and rank == 1:
            dist.destroy_process_group()
            time.sleep(1)  # the other rank notices, and ends first
    memlog.finish()
    dist.destroy_process_group()
    os._exit(0)  # see test_torchrun.py
""")


def start(folder: Path, how: str, backend: str, **more: str) -> "subprocess.Popen[str]":
    (folder / "train.py").write_text(TRAIN)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return subprocess.Popen(
        [sys.executable, *launcher, "train.py", how, backend],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(
    folder: Path, how: str, backend: str = "local", **more: str
) -> tuple[dict[int, RunDirectory], str]:
    """Train to the end. Return the runs by rank, and what the ranks have printed."""
    _, errors = start(folder, how, backend, **more).communicate(timeout=180)
    found = ranks(folder)
    assert sorted(found) == [0, 1], errors
    wait_until_over(found[0])
    return found, errors


def names_rank_1(told: Told, title: str, status: str) -> None:
    assert told.verdict.startswith(f"{title}. No growth: "), told.verdict
    assert told.status == status
    assert told.alerts == [title]


def test_a_rank_that_runs_out_of_memory_is_the_runs_first_line(
    tmp_path: Path, ready_store: str
) -> None:
    found, errors = train(tmp_path, "memory", "mlflow", MLFLOW_TRACKING_URI=ready_store)
    title = "Rank 1 ran out of memory on the host after step 19, 256.0 TiB requested"
    told = told_by_all(found[0])
    assert told.verdict.startswith(title)
    assert told.status == "failed"
    (alert,) = told.alerts
    assert alert.startswith(f"{title}: the whole memory is only ")
    own = told_by_all(found[1])
    assert own.verdict == told.verdict
    assert own.alerts == [alert]
    # Rank 0 ended later. If torchrun has not ended it before, it has printed the same.
    printed = [line for line in errors.splitlines() if line.startswith("memlog: No growth")]
    assert printed == []

    wait_for_end_of(found[0])
    tracked = only_run(ready_store)[1]
    assert tracked.info.status == "FAILED"
    assert title in tracked.data.tags["mlflow.note.content"]
    assert titles_in(tracked) == [alert]
    output = tmp_path / "out"
    place = ("--dir", str(found[0].path.parent), "-o", str(output))
    for source in ((), ("--backend", "mlflow")):
        child.memlog(
            *("pull", found[0].id, "--kind", "postmortem", *source, *place),
            directory=tmp_path,
            MLFLOW_TRACKING_URI=ready_store,
        )
        [report] = output.iterdir()
        assert report.read_text().startswith(f"# {alert}\n")
        report.unlink()


def titles_in(tracked: Any) -> list[str]:
    from mlflow.artifacts import load_dict

    found = load_dict(f"{tracked.info.artifact_uri}/memlog/alerts.json")
    return [alert["title"] for alert in found["alerts"]]


def test_the_run_in_wandb_has_failed_with_the_other_rank(tmp_path: Path) -> None:
    with WandbServer() as server:
        found, _ = train(tmp_path, "memory", "wandb", **server.environment)
        wait_until(lambda: all(run.complete for run in server.runs.values()))
        [tracked] = server.runs.values()
    title = "Rank 1 ran out of memory on the host after step 19"
    assert told_by_all(found[0]).verdict.startswith(title)
    assert tracked.exit_code == 1
    assert any(artifact.name.endswith("postmortem.md") for artifact in server.artifacts)


def test_a_rank_that_raises_is_named_though_the_other_ends_first(tmp_path: Path) -> None:
    found, _ = train(tmp_path, "raised")
    names_rank_1(told_by_all(found[0]), "Rank 1 failed after step 19 (ValueError)", "failed")


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    found, _ = train(tmp_path, "killed")
    told = told_by_all(found[0])
    names_rank_1(told, "Rank 1 was killed by SIGKILL after step 19", "killed")
    [report] = [
        each
        for each in found[0].events()
        if isinstance(each, Artifact) and each.kind == "postmortem"
    ]
    assert (found[0].path / report.path).read_text().startswith("# Rank 1 was killed by SIGKILL")


def test_a_rank_that_waits_for_a_dead_one_tells_it_while_it_waits(tmp_path: Path) -> None:
    """No launcher ends the rank that waits."""
    (tmp_path / "train.py").write_text(TRAIN)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **places}
    started = [
        child.start_program(
            tmp_path / "train.py",
            *("hung", "local"),
            directory=tmp_path,
            environment={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            **child.PIPES,
        )
        for rank in range(2)
    ]
    try:
        wait_until((tmp_path / "alone").exists)
        found = ranks(tmp_path)
        title = "Rank 1 was killed by SIGKILL after step 19"
        wait_until(lambda: summarize(found[0]).verdict.startswith(title))
        assert summarize(found[0]).status == "running"
    finally:
        (tmp_path / "enough").touch()
        for process in started:
            process.communicate(timeout=120)
    wait_until_over(found[0])
    names_rank_1(told_by_all(found[0]), title, "killed")


def test_the_lowest_rank_tells_its_own_failure_once(tmp_path: Path) -> None:
    found, _ = train(tmp_path, "own")
    title = "Rank 0 ran out of memory on the host after step 19, 256.0 TiB requested"
    told = told_by_all(found[0])
    assert told.verdict.startswith(title)
    assert told.status == "failed"
    (alert,) = told.alerts
    assert alert.startswith(title)
    assert (found[0].artifacts / "postmortem.md").read_text().startswith(f"# {title}")


def test_ranks_that_run_out_of_memory_together_have_one_alert(tmp_path: Path) -> None:
    found, _ = train(tmp_path, "all")
    told = told_by_all(found[0])
    assert told.verdict[7:].startswith("ran out of memory on the host after step 19")
    assert told.alerts == [told.verdict.partition(". ")[0]]
    assert told.status == "failed"


def test_ctrl_c_blames_no_rank(tmp_path: Path) -> None:
    launched = start(tmp_path, "interrupt", "local")
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    os.killpg(launched.pid, signal.SIGINT)
    launched.communicate(timeout=120)
    found = ranks(tmp_path)
    wait_until_over(found[0])
    told = told_by_all(found[0])
    assert told.verdict.startswith("Ranks 0 and 1 were "), told.verdict
    assert told.status == "killed"
    assert len(told.alerts) == 1


def test_a_leak_in_one_rank_is_the_runs_first_line(tmp_path: Path) -> None:
    found, errors = train(tmp_path, "leak")
    told = told_by_all(found[0])
    assert told.verdict.startswith("Rank 1: `kept`"), told.verdict
    assert (told.status, told.alerts) == ("finished", [])
    assert told.summary.findings[0].remedy
    assert not [each for each in found[0].events("trainer") if isinstance(each, Finding)]
    assert "memlog: No growth" not in errors


def test_ranks_that_all_finish_are_not_mentioned(tmp_path: Path, ready_store: str) -> None:
    found, _ = train(tmp_path, "fine", "mlflow", MLFLOW_TRACKING_URI=ready_store)
    told = told_by_all(found[0])
    assert "ank" not in told.verdict
    assert (told.status, told.alerts) == ("finished", [])
    wait_for_end_of(found[0])
    assert only_run(ready_store)[1].info.status == "FINISHED"
