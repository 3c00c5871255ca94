"""A W&B run of memlog's own: offline, and online against a double of the server with the real SDK."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import child
from support.truth import plan_of
from support.wandb_file import read_only_run
from support.wandb_server import WandbServer

from memlog.journal import RunDirectory, find_run
from memlog.journal.delivery_state import UploadState

pytestmark = pytest.mark.integration

TRAINER = """
    import time
    from pathlib import Path

    import memlog
    from memlog.events import Alert, Epoch, Evaluation, now_us

    Path("graph.json").write_text("{}")
    with memlog.init("wandb", project="p", name="own", finish_timeout=FINISH) as session:
        for step in range(60):
            session.step()
            time.sleep(0.002)
        for number in range(3):
            session.publish(Evaluation(now_us(), number, 0.5, 2**20))
        session.publish(Epoch(now_us(), 0, 59, 2**20, 2**21, "exact"))
        session.publish(Alert(now_us(), 30, "error", "host.rss > 1 GiB", "Host memory", "much"))
        session.save_artifact("graph.json", "flamegraph")
"""


def trainer(finish_timeout: float = 100) -> str:
    return TRAINER.replace("FINISH", str(finish_timeout))


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as running:
        yield running


def planned(run: RunDirectory) -> list[tuple[str, int, float]]:
    return sorted((point.name, point.index, point.value) for point in plan_of(run, "full"))


def points_in(rows: list[dict[str, float]]) -> list[tuple[str, int, float]]:
    """Return names, indices on their axes, and values of all rows. Fail if a row lies on several axes."""
    found = []
    for row in rows:
        axes = [axis for axis in ("step", "evaluation", "epoch") if f"memlog/{axis}" in row]
        assert len(axes) == 1, row
        index = int(row[f"memlog/{axes[0]}"])
        found += [
            (name, index, value)
            for name, value in row.items()
            if name.startswith(("memory/", "memlog/")) and name != f"memlog/{axes[0]}"
        ]
    return sorted(found)


def recorded(directory: Path) -> RunDirectory:
    return find_run(directory / "memlog_runs", "latest")


@pytest.mark.seed(162)
def test_an_own_run_offline_has_every_step(tmp_path: Path) -> None:
    child.run(trainer(), tmp_path, WANDB_MODE="offline")
    held, run = read_only_run(tmp_path), recorded(tmp_path)
    assert (held.run_id, held.project, held.job_type) == (f"memlog-{run.id}", "p", "memlog")
    assert points_in(held.rows) == planned(run)
    assert held.exit_code == 0
    assert held.metrics["memory/host/rss_peak_mib"]["summary"] == ["max"]
    assert held.metrics["memory/eval/host/rss_mib"]["step_metric"] == "memlog/evaluation"
    assert held.metrics["memory/epoch/host/rss_mib"]["step_metric"] == "memlog/epoch"
    assert held.config["memlog/python"]
    assert held.alerts == [{"title": "Host memory", "level": "ERROR"}]
    artifact, report = held.artifacts
    assert (artifact["type"], report["type"]) == ("flamegraph", "report")
    assert artifact["files"] == {"graph.json": str(run.artifacts / "graph.json")}
    assert held.summary["memlog/report"]["_type"] == "html-file"
    assert UploadState.load(run, "wandb").stage == "done"


@pytest.mark.seed(162)
def test_an_own_run_online_has_every_step_alert_and_file(
    tmp_path: Path, server: WandbServer
) -> None:
    child.run(trainer(), tmp_path, **server.environment)
    run = recorded(tmp_path)
    (held,) = server.runs.values()
    assert held.name == f"memlog-{run.id}"
    assert points_in(held.rows) == planned(run)
    assert (held.complete, held.exit_code) == (True, 0)
    assert [(alert["title"], alert["severity"]) for alert in server.alerts] == [
        ("Host memory", "ERROR")
    ]
    artifact, report = sorted(server.artifacts, key=lambda found: found.type)
    assert (artifact.type, report.type) == ("flamegraph", "report")
    assert artifact.state == "COMMITTED"
    assert server.blobs[artifact.files["graph.json"]] == b"{}"
    state = UploadState.load(run, "wandb")
    assert (state.stage, state.delivered) == ("done", len(planned(run)))


def wait_for_stage(run: RunDirectory, stage: str, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while (state := UploadState.load(run, "wandb")).stage != stage:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


def test_nobody_logged_in_is_one_line_with_the_remedy(tmp_path: Path, server: WandbServer) -> None:
    environment = {**server.environment, "WANDB_API_KEY": "", "NETRC": str(tmp_path / "none")}
    child.run(trainer(finish_timeout=1), tmp_path, **environment)
    run = recorded(tmp_path)
    wait_for_stage(run, "unreachable")
    problem = UploadState.load(run, "wandb").problem
    assert problem is not None
    assert problem.count("\n") == 0
    assert "wandb login" in problem
    assert "WANDB_MODE=offline" in problem
