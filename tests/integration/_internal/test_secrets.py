"""Secrets in addresses, queries and the environment appear in no file, line or command line."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from support import child
from support.command_secrets import commands, of_services
from support.faults import Fault
from support.mlflow_server import answering_server, running_mlflow_server, sqlite_store
from support.truth import wait_until_delivered
from support.wandb_server import WandbServer

from memlog.journal import list_runs
from memlog.journal.delivery_state import UploadState

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENVIRONMENT = {
    "WANDB_API_KEY": "sekret" * 6 + "0123",
    "AWS_SECRET_ACCESS_KEY": "sekret-aws",
    "HF_TOKEN": "sekret-hf",
    "MLFLOW_TRACKING_USERNAME": "me",
    "MLFLOW_TRACKING_PASSWORD": "sekret-mlflow",
}

TRAINER = """
    import os
    from pathlib import Path

    import mlflow
    import memlog

    mlflow.set_tracking_uri(os.environ["WHERE"])
    session = memlog.init(
        "mlflow", dir="runs", alerts=["host.rss > 1 KiB"], finish_timeout=2, name="mine",
        config={"memlog": {"linger": 1}},
    )
    Path("graph.svg").write_text("<svg/>")
    for step in range(50):
        session.step()
        if step == 25:
            session.save_artifact("graph.svg", "flamegraph")
            print("ready", flush=True)
            input()
    session.finish()
"""


WITH_WANDB = """
    import sys
    from pathlib import Path

    import memlog

    if "in process" in sys.argv:
        import wandb
        run = wandb.init(project="p", settings=wandb.Settings(console="off", silent=True))
    options = {"finish_timeout": 30, "config": {"memlog": {"linger": 1, "bind_grace": 0}}}
    session = memlog.init("wandb", dir="runs", alerts=["host.rss > 1 KiB"], **options)
    Path("graph.svg").write_text("<svg/>")
    for step in range(50):
        session.step()
        if "in process" in sys.argv:
            run.log({"loss": step})
        if step == 25:
            session.save_artifact("graph.svg", "flamegraph")
            print("ready", flush=True)
            input()
    session.finish()
"""


COMMANDS = """
    import sys

    import mlflow
    import wandb

    from memlog.cli.main import main

    for command in ("show latest", "show latest --json", "runs --json", "sync latest --timeout 2"):
        sys.argv = ["memlog", *command.split(), "--dir", "runs"]
        try:
            main()
        except SystemExit:
            pass
"""


def family(pid: int) -> Iterator[str]:
    """Command lines of a process and of its descendants."""
    process = psutil.Process(pid)
    for member in (process, *process.children(recursive=True)):
        # A descendant can end during the loop, such as git, which the helper process starts for the commit.
        with suppress(psutil.NoSuchProcess):
            yield " ".join(member.cmdline())


def lines_until(process: "subprocess.Popen[str]", holds: Callable[[], object]) -> set[str]:
    """Collect the command lines of a trainer and its descendants until ``holds`` returns true."""
    deadline = time.monotonic() + 120
    lines = set(family(process.pid))
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
        lines |= set(family(process.pid))
    return lines


def has_talked(directory: Path, backend: str) -> bool:
    """Return True if the helper has reached the tracker, or has noted a problem."""
    [run] = list_runs(directory / "runs")
    state = UploadState.load(run, backend)
    return bool(state.problem or state.delivered or state.provisional)


def whole_session(
    directory: Path,
    where: str,
    script: str = TRAINER,
    *arguments: str,
    until: Callable[[], object] | None = None,
    **environment: str,
) -> None:
    """Train until the helper has reached a tracker, run show and sync, and search all output and files."""
    environment = {**environment, **ENVIRONMENT}
    process = child.start(
        script,
        directory,
        *arguments,
        stdin=subprocess.PIPE,
        fork=False,  # the test searches the command lines of these processes
        WHERE=where,
        **environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        lines = lines_until(process, until or (lambda: has_talked(directory, "mlflow")))
        assert any("memlog.delivery" in line for line in lines)
        printed = [*lines, *process.communicate("\n", timeout=120)]
    finally:
        process.kill()
    assert process.returncode == 0, printed[-1]
    printed += child.start(
        COMMANDS, directory, MLFLOW_TRACKING_URI=where, **environment
    ).communicate(timeout=120)
    assert "mine" in printed[-2] or script != TRAINER
    assert [text for text in printed if "sekret" in text] == []
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert "helper.log" in {path.name for path in files}
    assert [path for path in files if b"sekret" in path.read_bytes()] == []


def test_no_secret_appears_when_all_goes_well(tmp_path: Path) -> None:
    with running_mlflow_server(tmp_path) as server:
        whole_session(tmp_path, server.url.replace("//", "//me:a b\tsekret uri@"))
        wait_until_delivered(tmp_path / "runs")


@pytest.mark.parametrize(("how", "status"), [("own", None), ("in process", None), ("own", 401)])
def test_no_secret_appears_with_wandb(tmp_path: Path, how: str, status: int | None) -> None:
    """The server either accepts everything or refuses the uploads of rows."""
    with WandbServer() as server:
        if status is not None:
            server.fault = Fault(status=status, hits=lambda path: "file_stream" in path)
        whole_session(
            tmp_path,
            "",
            WITH_WANDB,
            how,
            until=lambda: (
                any(run.rows for run in server.runs.values())
                or (how == "own" and has_talked(tmp_path, "wandb"))
            ),
            **server.environment,
        )
        assert server.runs


@pytest.mark.parametrize(("status", "user"), [(200, "me:sekret/u@ri"), (401, "me:a b\tsekret uri")])
def test_no_secret_appears_when_the_tracker_fails(tmp_path: Path, status: int, user: str) -> None:
    """The clients' errors often contain the tracker's address."""
    with answering_server() as server:
        server.status = status
        url = server.url.replace("//", f"//{user}@") + "/?api_key=sekret-query"
        whole_session(tmp_path, url)
    [run] = list_runs(tmp_path / "runs")
    assert "trying again" in (run.path / "helper.log").read_text()


WITH_ARGUMENTS = """
    import os
    import sys

    import memlog

    backend = os.environ["BACKEND"]
    session = memlog.init(backend, dir="runs", name="mine", finish_timeout=60)
    for step in range(5):
        session.step()
    error = RuntimeError(f"401 for {os.environ['HF_TOKEN']}: X-Api-Key: {os.environ['OTHER']}")
    try:
        with session:
            raise error
    except RuntimeError:
        pass
"""
SOME_COMMANDS = [
    *(arguments for index, (arguments, _) in enumerate(commands("sekret")) if index % 67 == 0),
    *of_services("aB3defsekretXq8"),
    ["sekret-hf"],
]


@pytest.mark.parametrize("backend", ["mlflow", "wandb"])
@pytest.mark.parametrize(
    "some_commands", [SOME_COMMANDS[::2], SOME_COMMANDS[1::2]], ids=["even", "odd"]
)
def test_no_secret_of_a_command_line_appears(
    tmp_path: Path, backend: str, some_commands: list[list[str]]
) -> None:
    """Half of the arguments at a time, since a long command is cut."""
    arguments = [each for some in some_commands for each in some]
    secret = {**ENVIRONMENT, "OTHER": "aB3defsekretXq8", "BACKEND": backend}
    with contextlib.ExitStack() as stack:
        if backend == "wandb":
            server = stack.enter_context(WandbServer())
            there = server.environment
        else:
            there = {"MLFLOW_TRACKING_URI": sqlite_store(tmp_path)}
        process = child.start(
            WITH_ARGUMENTS, tmp_path, *arguments, fork=False, **{**there, **secret}
        )
        printed = [*process.communicate(timeout=120)]
        assert process.returncode == 0, printed[1]
        for command in ("show", "show --json", "report -o report.html"):
            name, *rest = command.split()
            shown = child.start_memlog(
                name, "latest", *rest, "--dir", "runs", directory=tmp_path, MEMLOG_X=""
            )
            printed += shown.communicate(timeout=120)
        if backend == "wandb":
            told = [run.config["memlog/command"] for run in server.runs.values()]
        else:
            client = MlflowClient(there["MLFLOW_TRACKING_URI"])
            told = [run.data.params["memlog/command"] for run in client.search_runs(["0"])]
    assert len(told) == 1
    assert "train.py" in told[0]
    assert not told[0].endswith("…")
    assert (tmp_path / "report.html").exists()
    assert [text for text in [*printed, *told] if "sekret" in text] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"sekret" in path.read_bytes()] == []
