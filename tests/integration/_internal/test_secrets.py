"""Secrets in addresses, queries and the environment appear in no file, line or command line."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import child
from support.faults import Fault
from support.mlflow_server import answering_server, running_mlflow_server
from support.truth import wait_until_delivered
from support.wandb_server import WandbServer

from memlog.journal import list_runs

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
]

ENVIRONMENT = {
    "WANDB_API_KEY": "sekret" * 6 + "0123",
    "AWS_SECRET_ACCESS_KEY": "sekret-aws",
    "HF_TOKEN": "sekret-hf",
    "MLFLOW_TRACKING_USERNAME": "me",
    "MLFLOW_TRACKING_PASSWORD": "sekret-mlflow",
}

TRAINER = """
    import os
    import time
    from pathlib import Path

    import mlflow
    import memlog

    mlflow.set_tracking_uri(os.environ["WHERE"])
    session = memlog.init(
        "mlflow", dir="runs", alerts=["host.rss > 1 KiB"], finish_timeout=5, name="mine",
        config={"memlog": {"linger": 5}},
    )
    Path("graph.svg").write_text("<svg/>")
    for step in range(50):
        session.step()
        if step == 25:
            session.save_artifact("graph.svg", "flamegraph")
            print("ready", flush=True)
            time.sleep(6)
    session.finish()
"""


WITH_WANDB = """
    import sys
    import time
    from pathlib import Path

    import memlog

    if "ride" in sys.argv:
        import wandb
        run = wandb.init(project="p", settings=wandb.Settings(console="off", silent=True))
    options = {"finish_timeout": 30, "config": {"memlog": {"linger": 5, "bind_grace": 0}}}
    session = memlog.init("wandb", dir="runs", alerts=["host.rss > 1 KiB"], **options)
    Path("graph.svg").write_text("<svg/>")
    for step in range(50):
        session.step()
        if "ride" in sys.argv:
            run.log({"loss": step})
        if step == 25:
            session.save_artifact("graph.svg", "flamegraph")
            print("ready", flush=True)
            time.sleep(4)
    session.finish()
"""


def family(pid: int) -> Iterator[str]:
    """The command lines of a process and its descendants."""
    process = psutil.Process(pid)
    for member in (process, *process.children(recursive=True)):
        yield " ".join(member.cmdline())


def whole_session(
    directory: Path, where: str, script: str = TRAINER, *arguments: str, **environment: str
) -> None:
    """Train, show and sync; search all output and files."""
    environment = {**environment, **ENVIRONMENT}
    process = child.start(script, directory, *arguments, WHERE=where, **environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(3)  # the client is being imported, or at work
    lines = list(family(process.pid))
    assert any("memlog.delivery" in line for line in lines)
    said = [*lines, *process.communicate(timeout=120)]
    assert process.returncode == 0, said[-1]
    for command in ("show latest", "show latest --json", "runs --json", "sync latest --timeout 2"):
        done = subprocess.run(
            [sys.executable, "-m", "memlog", *command.split(), "--dir", "runs"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **environment, "MLFLOW_TRACKING_URI": where},
        )
        said += [done.stdout, done.stderr]
    assert [text for text in said if "sekret" in text] == []
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert "helper.log" in {path.name for path in files}
    assert [path for path in files if b"sekret" in path.read_bytes()] == []


@pytest.mark.parametrize("user", ["me:sekret-uri", "me:a b\tsekret uri"])
def test_where_all_goes_well(tmp_path: Path, user: str) -> None:
    with running_mlflow_server(tmp_path) as server:
        whole_session(tmp_path, server.url.replace("//", f"//{user}@"))
        wait_until_delivered(tmp_path / "runs")


@pytest.mark.parametrize(("how", "status"), [("own", None), ("ride", None), ("own", 401)])
def test_with_wandb(tmp_path: Path, how: str, status: int | None) -> None:
    """The server works, or refuses every request but the one that opens a run."""
    with WandbServer() as server:
        if status is not None:
            server.fault = Fault(status=status, hits=lambda path: "file_stream" in path)
        whole_session(tmp_path, "", WITH_WANDB, how, **server.environment)
        assert server.runs


@pytest.mark.parametrize("user", ["me:sekret/u@ri", "me:a b\tsekret uri"])
@pytest.mark.parametrize("status", [200, 401, 500])
def test_where_the_tracker_is_in_trouble(tmp_path: Path, status: int, user: str) -> None:
    """Clients' errors often contain addresses."""
    with answering_server() as server:
        server.status = status
        url = server.url.replace("//", f"//{user}@") + "/?api_key=sekret-query"
        whole_session(tmp_path, url)
    [run] = list_runs(tmp_path / "runs")
    assert "trying again" in (run.path / "helper.log").read_text()
