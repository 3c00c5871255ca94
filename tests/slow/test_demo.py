"""The demo as a person sees it: printed lines, an alert during the run, MLflow's page and a flame graph."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import child
from support.browser import SOFTWARE_GL, chromium, newest_run, show_memory
from support.mlflow_server import running_mlflow_server
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
BESIDE = "memlog/artifacts/flamegraph/worst-step.html"


def memlog(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    own = ("MLFLOW_", "MEMLOG_", "WANDB_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    variables = {"MLFLOW_DISABLE_TELEMETRY": "true", "MEMLOG_DIR": str(folder / "runs")}
    process = child.start_memlog(*arguments, directory=folder, inherited=inherited, **variables)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, output + errors
    return subprocess.CompletedProcess(process.args, 0, output, errors)


def alerts(folder: Path) -> list[Alert]:
    run = find_run(folder / "runs", "latest")
    events = run.events()
    return [event for event in events if isinstance(event, Alert)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the demo runs and creates MLflow's database."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def done(folder: Path) -> "subprocess.CompletedProcess[str]":
    """The finished demo, after everything that it recorded was delivered to MLflow."""
    demo = memlog(folder, "demo", "--steps", str(STEPS))
    memlog(folder, "sync", "latest")  # where the helper had no time to deliver all of it
    return demo


def test_the_demos_memory_is_on_mlflows_page(
    folder: Path, done: "subprocess.CompletedProcess[str]", tmp_path: Path
) -> None:
    assert done.stdout.splitlines()[-3:] == [
        "  memlog show latest",
        "  memlog open latest    (which layer holds how much, in your browser)",
        "  mlflow ui --backend-store-uri sqlite:///mlflow.db   "
        "(http://127.0.0.1:5000: Model training, memlog-demo, its run, Model metrics)",
    ]
    shown = json.loads(memlog(folder, "show", "latest", "--json").stdout)
    assert (shown["status"], shown["steps"]) == ("finished", STEPS)
    assert shown["peaks"]["host.rss"]["bytes"] > 100 * 2**20

    uri = f"sqlite:///{folder}/mlflow.db"
    with running_mlflow_server(tmp_path, uri) as server, chromium() as page:
        experiment, run = newest_run(uri)
        show_memory(page, server.url, experiment, run)
        picture = page.screenshot(path=tmp_path / "page.png")
        headings = page.get_by_test_id("experiment-view-compare-runs-section-header")
        sections = [text.splitlines()[0] for text in headings.all_inner_texts()]

        page.goto(f"{server.url}/#/experiments/{experiment}/runs/{run}")
        page.get_by_text("Show more").click()
        page.get_by_text(re.compile("^memlog show .*")).wait_for()
        page.screenshot(path=tmp_path / "description.png")
        described = page.locator("table", has_text="by memlog").first.inner_text()

        page.goto(f"{server.url}/#/experiments/{experiment}/runs/{run}/artifacts/{BESIDE}")
        frame = page.frame_locator("iframe")
        frame.get_by_role("heading", name="What the memory is").wait_for()
        page.screenshot(path=tmp_path / "graph.png")
        title = frame.get_by_role("heading", level=1).inner_text()
    assert len(picture) > 20_000  # an empty page is smaller: the charts were awaited above
    of_memory = ["memory/host", "memory/layers", "memory/step", "memory/trace"]
    assert sections == [*of_memory, "Model metrics"]  # the last is MLflow's own, and empty
    assert f"finished, {STEPS} steps" in described
    # The first traced step has a lower bound, as the model was called before. The budget may allow no other.
    assert re.fullmatch(r"GPT, step [0-9]+: (at least )?[0-9.]+ MiB at the peak", title)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches speedscope: not installed")
def test_the_mistake_raises_one_alert_and_the_graph_is_shown(
    folder: Path, done: "subprocess.CompletedProcess[str]", tmp_path: Path
) -> None:
    import mlflow

    (alert,) = alerts(folder)
    assert alert.step is not None
    assert alert.step >= HALFWAY
    assert f"memlog: warning: {alert.title} (step {alert.step})" in done.stderr
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'memlog-demo'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["memlog.alert.count"] == "1"
    assert run.data.tags["memlog.alert.last"] == f"{alert.title} (step {alert.step})"
    (row,) = client.get_metric_history(run.info.run_id, "memory/step/alert")
    assert row.step == alert.step
    held = client.get_metric_history(run.info.run_id, "memory/host/rss_mib")
    assert sorted(point.step for point in held) == list(range(STEPS))
    memlog(folder, "pull", "latest", "--backend", "mlflow", "-o", "pulled")
    with (
        opened(folder / "pulled" / GRAPH, tmp_path / "cache") as url,
        chromium(*SOFTWARE_GL) as page,
    ):
        page.goto(url)
        page.get_by_text(
            re.compile(r"^GPT, step [0-9]+: .* MiB at the peak \(in MiB\)")
        ).first.wait_for()
        rows = shown_rows(page)
    assert "[parameters]" in rows
    assert any(name.startswith("blocks.3.mlp") for name in rows)


def test_with_wandb_offline_the_same_is_in_its_file(tmp_path: Path) -> None:
    demo = memlog(tmp_path, "demo", "--steps", str(STEPS), "--backend", "wandb")
    assert "wandb sync wandb/offline-run-*" in demo.stdout
    memlog(tmp_path, "sync", "latest")
    (alert,) = alerts(tmp_path)
    assert alert.step is not None
    assert alert.step >= HALFWAY
    held = read_only_run(tmp_path)
    assert held.alerts == [{"title": alert.title[:64], "level": "WARN"}]
    assert {artifact["type"] for artifact in held.artifacts} == {"flamegraph", "report"}
    named = [name for artifact in held.artifacts for name in artifact["files"]]
    assert sorted(set(named)) == ["report.html", "worst-step.html", GRAPH]
    assert held.summary["memlog/report"]["_type"] == "html-file"
    steps = [row["memlog/step"] for row in held.rows if "memory/host/rss_mib" in row]
    assert steps == list(range(STEPS))
    assert json.dumps(held.rows).count("memory/layers/") > 0
