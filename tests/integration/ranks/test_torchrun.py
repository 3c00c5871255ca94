"""Real trainings of several ranks, some below torchrun, and their one run in MLflow."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.mlflow_server import free_port
from support.ranks import only_run, ranks, wait_for_end_of

from memlog._internal.processes import RankPosition
from memlog.events import Alert, Exit, Ranks
from memlog.journal import RunDirectory, list_runs
from memlog.metrics import values
from memlog.ranks.registration import registration_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TRAIN = textwrap.dedent("""
    import os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist, torch.distributed.fsdp
    import memlog

    def train(rank, size, how):
        if how != "late":
            dist.init_process_group("gloo")
        if how != "others" or rank:
            memlog.init("mlflow")
        if how == "late":
            dist.init_process_group("gloo", rank=rank, world_size=size)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        if how == "late":
            mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
            for module in (*model, model):
                torch.distributed.fsdp.fully_shard(module, mesh=mesh)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(12):
            if step == 5 and how == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                dist.barrier()
                if rank == 1:
                    raise RuntimeError("the first attempt fails")
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            while step == 8 and how == "kill" and rank == 1:
                # The helper process of each rank watches its rank.
                time.sleep(0.1)
                found = [*Path("memlog_runs").glob("*/helper-*")]
                if sum('["sample"' in each.read_text() for each in found) == 2:
                    # torchrun must not wait for this process before the helper process has seen its end.
                    os.kill(os.getppid(), signal.SIGSTOP)
                    os.kill(os.getpid(), signal.SIGKILL)
            while step == 8 and how == "kill" and rank == 0:
                time.sleep(0.1)
                found = Path("memlog_runs").glob("*/helper-*")
                if any('["exit"' in each.read_text() for each in found):
                    os.kill(os.getppid(), signal.SIGCONT)
                    break
        memlog.finish()
        dist.destroy_process_group()
        # Freeing the model can hang in torch 2.13: it waits for gloo's thread, which waits for the GIL.
        os._exit(0)

    if __name__ == "__main__":
        how = sys.argv[1]
        if how == "late":
            torch.multiprocessing.spawn(train, (2, how), nprocs=2)
        else:
            train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), how)
""")


def run(folder: Path, how: str, store: str) -> int:
    """Train with two or three ranks in the way that ``how`` names."""
    script = folder / "train.py"
    # With MLflow named first, the ranks, and their helpers, have imported everything already.
    script.write_text("import mlflow\n" + TRAIN if how == "others" else TRAIN, encoding="utf-8")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": store}
    if how in ("restart", "kill"):
        return run_below_torchrun(folder, how, variables)
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    size = 1 if how == "late" else 3
    started = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        environment = variables if how == "late" else variables | own
        process = child.start_program(
            script, how, directory=folder, environment=environment, stderr=subprocess.PIPE
        )
        started.append(process)
    errors = [process.communicate(timeout=180)[1] for process in started]
    (folder / "errors.txt").write_text("".join(errors))
    assert [process.returncode for process in started] == [0] * size, errors
    return 0


def run_below_torchrun(folder: Path, how: str, variables: dict[str, str]) -> int:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "1" if how == "restart" else "0"]
    if how != "kill":
        # torch 2.13 keeps the first attempt's addresses of gloo in the store that it shares with the workers.
        variables = {**variables, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py", how],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0 or how == "kill", done.stderr
    return done.returncode


def position_of(run: RunDirectory) -> RankPosition:
    registration = registration_of(run)
    assert registration is not None
    return registration.position


def mlflow_alerts(client: Any, tracked: Any) -> list[tuple[str, int]]:
    from mlflow.artifacts import load_dict

    found = load_dict(f"{tracked.info.artifact_uri}/memlog/alerts.json")
    return [(alert["rule"], alert["step"]) for alert in found["alerts"]]


def test_all_ranks_have_one_run_with_the_memory_of_all(tmp_path: Path, ready_store: str) -> None:
    """The ranks of a sharded model make their process group after memlog's session."""
    run(tmp_path, "late", ready_store)
    found = ranks(tmp_path)
    assert sorted(found) == [0, 1]
    wait_for_end_of(found[0])
    client, tracked = only_run(ready_store)
    spread = [event for event in found[0].events() if isinstance(event, Ranks)]
    assert [event.step for event in spread] == list(range(12))
    assert {event.reporting for event in spread} == {2}
    for metric in values(spread[0]):
        history = client.get_metric_history(tracked.info.run_id, metric.name)
        assert [point.step for point in history] == list(range(12)), metric.name
        assert history[0].value == metric.value


def test_a_training_that_is_restarted_goes_on_in_its_run(tmp_path: Path, ready_store: str) -> None:
    run(tmp_path, "restart", ready_store)
    runs = list_runs(tmp_path / "memlog_runs")
    first, second = (each for each in runs if position_of(each).rank == 0)
    assert [position_of(each).restart for each in (first, second)] == [0, 1]
    wait_for_end_of(second)
    client, tracked = only_run(ready_store)
    assert tracked.info.status == "FINISHED"
    for metric in ("host/rss_mib", "ranks/host/rss_max_mib", "ranks/reporting"):
        history = client.get_metric_history(tracked.info.run_id, f"memory/{metric}")
        assert [point.step for point in history] == list(range(5 + 12)), metric
    alerts = mlflow_alerts(client, tracked)
    assert ("ranks: restarted", 5) in alerts
    assert alerts[0][0] == "ranks: ended"


def test_the_lowest_rank_that_records_has_the_run(tmp_path: Path, ready_store: str) -> None:
    run(tmp_path, "others", ready_store)
    found = ranks(tmp_path)
    assert sorted(found) == [1, 2]
    wait_for_end_of(found[1])
    client, tracked = only_run(ready_store)
    for metric in ("host/rss_mib", "ranks/host/rss_max_rank"):
        history = client.get_metric_history(tracked.info.run_id, f"memory/{metric}")
        assert [point.step for point in history] == list(range(12)), metric
    assert tracked.data.params["memlog/rank"] == "1"
    assert f"memlog: mlflow run {tracked.info.run_name!r}" in (tmp_path / "errors.txt").read_text()


def test_each_rank_has_a_helper_process_and_the_rank_that_was_killed_is_named(
    tmp_path: Path, ready_store: str
) -> None:
    assert run(tmp_path, "kill", ready_store) != 0
    found = ranks(tmp_path)
    wait_for_end_of(found[0])
    helpers = {f.process for r in found.values() for f in r.files() if f.process[0] == "h"}
    assert len(helpers) == 2
    [seen] = [event for event in found[1].events() if isinstance(event, Exit)]
    assert seen.signal == "SIGKILL"
    [alert] = [e for e in found[0].events() if isinstance(e, Alert) and e.rule == "ranks: ended"]
    assert alert.title == "Rank 1 was killed by SIGKILL after step 8"
    assert alert.text.startswith("rank 0 ended afterwards")
    only_run(ready_store)
