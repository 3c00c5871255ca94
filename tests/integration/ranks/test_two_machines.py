"""A training on two machines: network namespaces with names of their own, and one folder of runs."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.ranks import only_run, wait_for_end_of

from memlog.events import Alert, Ranks
from memlog.journal import list_runs
from memlog.ranks.registration import ranks_of, registration_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ISOLATED = ["unshare", "--map-root-user", "--net", "--mount", "--uts", "--kill-child", "--fork"]

MACHINES = textwrap.dedent("""
    set -e
    mkfifo made connected
    printf '127.0.0.1 localhost\\n10.0.0.1 node0\\n10.0.0.2 node1\\n' > hosts
    mount --bind hosts /etc/hosts
    connect() {
        hostname "node$1"; ip link set lo up; ip addr add "10.0.0.$2/24" dev "$3"; ip link set "$3" up
    }
    train() { GLOO_SOCKET_IFNAME=$1 exec "$PYTHON" -m torch.distributed.run --nnodes 2 --rdzv-backend c10d \
        --rdzv-endpoint 10.0.0.1:29400 --rdzv-id two --max-restarts 1 train.py; }
    # A network can be given to a machine once its first process is in it.
    ( export -f connect train
      exec unshare --net --uts bash -ec 'echo > made; read -r _ < connected; connect 1 2 end1; train end1' ) &
    read -r _ < made
    ip link add end0 type veth peer name end1 netns $!
    connect 0 1 end0
    echo > connected
    ( train end0 )
    wait $!
""")

TRAIN = textwrap.dedent("""
    import os, signal
    from pathlib import Path
    import torch, torch.distributed as dist
    import memlog

    dist.init_process_group("gloo")
    rank, failed = dist.get_rank(), Path("failed")
    memlog.init("mlflow", name="two machines")
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    is_first = not failed.exists()
    for step in range(12):
        weight.square().mean().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
        if step == 5 and is_first:
            dist.barrier()
            if rank == 1:
                failed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # as a collective of NCCL does; the launcher ends it, and counts no failure here
    memlog.finish()
    dist.destroy_process_group()
    os._exit(0)  # see test_torchrun.py
""")


@pytest.fixture(autouse=True)
def _can_isolate() -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip (util-linux, iproute2)")
    probe = [*ISOLATED, "ip", "link", "add", "end0", "type", "veth", "peer", "name", "end1"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"this system gives a process no network of its own: {tried.stderr.strip()}")


def test_training_on_two_machines_survives_a_failure(tmp_path: Path, ready_store: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [*ISOLATED, "bash", "-c", MACHINES],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "MLFLOW_TRACKING_URI": ready_store,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see test_torchrun.py
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no run of a lower rank" not in done.stderr

    attempts = {run: registration_of(run) for run in list_runs(tmp_path / "memlog_runs")}
    assert {(it.host, it.position.rank, it.position.restart) for it in attempts.values() if it} == {
        ("node0", 0, 0),
        ("node1", 1, 0),
        ("node1", 1, 1),
    }
    first, second = (run for run, it in attempts.items() if it and it.position.rank == 0)
    events = {run: list(run.events()) for run in (first, second)}
    for run, steps in ((first, 6), (second, 12)):
        spread = [event for event in events[run] if isinstance(event, Ranks)]
        assert [(event.step, event.reporting) for event in spread] == [(s, 2) for s in range(steps)]
        for rank in ranks_of(run).values():
            helpers = [file.process for file in rank.files() if file.process[0] == "h"]
            assert len(helpers) == 1
    [ended] = [e for e in events[first] if isinstance(e, Alert) and e.rule == "ranks: ended"]
    assert ended.title.startswith("Rank 1 ")
    assert [e.rule for e in events[second] if isinstance(e, Alert)] == ["ranks: restarted"]

    wait_for_end_of(second)
    client, tracked = only_run(ready_store)
    for metric in ("host/rss_mib", "ranks/reporting"):
        history = client.get_metric_history(tracked.info.run_id, f"memory/{metric}")
        assert [point.step for point in history] == list(range(6 + 12)), metric
