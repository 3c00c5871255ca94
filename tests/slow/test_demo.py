"""The demo as the README has it: an alert in mid-run, and a flame graph that comes to the screen."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import SOFTWARE_GL, chromium
from support.opened_page import opened, shown_rows
from support.wandb_file import read_only_run

from memlog.events import Alert
from memlog.journal import find_run

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    # MLflow 3.17's own models, as SQLAlchemy 2.1 sees them.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]

STEPS = 12
HALFWAY = 6
GRAPH = "worst-step.speedscope.json.gz"


def memlog(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    own = ("MLFLOW_", "MEMLOG_", "WANDB_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    done = subprocess.run(
        [sys.executable, "-m", "memlog", *arguments],
        cwd=folder,
        env={**inherited, "MLFLOW_DISABLE_TELEMETRY": "true", "MEMLOG_DIR": str(folder / "runs")},
        capture_output=True,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def alerts(folder: Path) -> list[Alert]:
    run = find_run(folder / "runs", "latest")
    events = (entry.event for file in run.files() for entry in file.read())
    return [event for event in events if isinstance(event, Alert)]


@pytest.mark.seed(197, 240, 243)
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches speedscope: not installed")
def test_the_mistake_raises_one_alert_and_the_graph_is_shown(tmp_path: Path) -> None:
    import mlflow

    demo = memlog(tmp_path, "demo", "--steps", str(STEPS))
    (alert,) = alerts(tmp_path)
    assert alert.step == HALFWAY
    assert f"memlog: warning: {alert.title} (step {HALFWAY})" in demo.stderr
    memlog(tmp_path, "sync", "latest")  # where the helper had no time to deliver all of it
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'memlog-demo'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["memlog.alert.count"] == "1"
    assert run.data.tags["memlog.alert.last"] == f"{alert.title} (step {HALFWAY})"
    (row,) = client.get_metric_history(run.info.run_id, "memlog/alert")
    assert row.step == HALFWAY
    memlog(tmp_path, "pull", "latest", "--backend", "mlflow", "-o", "pulled")
    with (
        opened(tmp_path / "pulled" / GRAPH, tmp_path / "cache") as url,
        chromium(*SOFTWARE_GL) as page,
    ):
        page.goto(url)
        page.get_by_text("(1/3)").wait_for()
        rows = shown_rows(page)
    assert "[parameters]" in rows
    assert any(name.startswith("blocks.3.mlp") for name in rows)


def test_with_wandb_offline_the_same_is_in_its_file(tmp_path: Path) -> None:
    demo = memlog(tmp_path, "demo", "--steps", str(STEPS), "--backend", "wandb")
    assert "wandb sync wandb/offline-run-*" in demo.stdout
    memlog(tmp_path, "sync", "latest")
    (alert,) = alerts(tmp_path)
    assert alert.step == HALFWAY
    held = read_only_run(tmp_path)
    assert held.alerts == [{"title": alert.title[:64], "level": "WARN"}]
    assert [artifact["type"] for artifact in held.artifacts] == ["flamegraph"]
    steps = [row["memlog/step"] for row in held.rows if "memory/host/rss_mib" in row]
    assert steps == list(range(STEPS))
    assert json.dumps(held.rows).count("memory/layers/") > 0
