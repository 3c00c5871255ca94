"""MLflow runs of the user's that end before memlog does: the verdict is in the run before it ends."""

import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import child

from memlog.journal import RunDirectory, find_run
from memlog.reports import summarize

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ready_store")]

NOTE = "mlflow.note.content"
PREAMBLE = """
    import gc
    import json
    import os
    import time

    import torch
    import mlflow

    import memlog
    from memlog.delivery.helper import protocol

    protocol.SETTLED_WITHIN = 100.0  # on a busy machine, a second may be too short
    session = memlog.init("mlflow", finish_timeout=100)

    def leak(count=120):
        kept = []
        if count > 1:
            gc.collect()  # of mlflow's garbage, which would explain a part of the growth
        for _ in range(count):
            kept.append(torch.ones(512, 512))
            session.step()
            time.sleep(0.02)  # the helper process suspects growth after some steps, then a search begins
        return kept
"""
LOOK = """
    found = mlflow.search_runs(output_format="list")[0]
    file = mlflow.MlflowClient().download_artifacts(
        found.info.run_id, "memlog/artifacts/report/report.html", os.getcwd()
    )
    os.rename(file, "seen.html")
    with open("seen.json", "w") as seen:
        json.dump({"tags": found.data.tags, "params": found.data.params}, seen)
"""
"""What the run has when the program goes on after its end."""
ENDINGS = {
    "end_run": """
    mlflow.start_run()
    kept = leak()
    mlflow.end_run()
    """,
    "with": """
    with mlflow.start_run():
        kept = leak()
    """,
    "a logger": """
    client = mlflow.MlflowClient()
    run_id = client.create_run("0").info.run_id
    session.join_run("mlflow", run_id)
    kept = leak()
    client.set_terminated(run_id, "FINISHED")
    """,
}


def client_of(directory: Path) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{directory}/mlflow.db")


def runs_of(directory: Path) -> list[Any]:
    client = client_of(directory)
    experiments = [one.experiment_id for one in client.search_experiments()]
    return list(client.search_runs(experiments, order_by=["attributes.start_time ASC"]))


def recorded(directory: Path) -> RunDirectory:
    return find_run(directory / "memlog_runs", "latest")


def train(script: str, directory: Path, status: int = 0) -> str:
    process = child.start(PREAMBLE + script, directory)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == status, errors
    return errors


def text_of(page: Path) -> str:
    text = re.sub(r"<[^>]+>", " ", re.sub("</?code>", "`", page.read_text()))
    return " ".join(html.unescape(text).split())


def report_of(run: Any, directory: Path) -> str:
    """Return the text of the report among a run's artifacts."""
    where = run.info.run_id, "memlog/artifacts/report/report.html", str(directory)
    return text_of(Path(client_of(directory).download_artifacts(*where)))


@pytest.mark.parametrize("how", ENDINGS)
def test_the_verdict_is_in_the_run_when_it_ends(tmp_path: Path, how: str) -> None:
    errors = train(ENDINGS[how] + LOOK, tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    verdict = summarize(recorded(tmp_path)).verdict
    assert "`kept`" in verdict
    assert verdict in errors
    assert verdict in text_of(tmp_path / "seen.html")
    assert verdict in seen["tags"][NOTE]
    assert "| Run | finished, 120 steps" in seen["tags"][NOTE]
    title, grows, _ = verdict.partition(" Memory grows")
    if (
        grows
    ):  # on a busy machine, few steps may be not enough to confirm the growth: then it is unsure
        assert title in seen["tags"]["memlog.alert.last"]
    assert {"memlog/command", "memlog/host", "memlog/overhead_ms"} <= set(seen["params"])
    (run,) = runs_of(tmp_path)
    assert run.info.status == "FINISHED"
    assert verdict in report_of(run, tmp_path)
    assert verdict in run.data.tags[NOTE]
    levels = client_of(tmp_path).get_metric_history(run.info.run_id, "memory/host/rss_mib")
    assert [level.step for level in levels] == list(range(120))


def test_each_run_of_a_session_keeps_its_own_verdict(tmp_path: Path) -> None:
    train(
        """
    for grows in (False, True):
        with mlflow.start_run():
            kept = [leak(1) for _ in range(120)] if grows else [None for _ in range(120) if leak(1)]
    """,
        tmp_path,
    )
    first, second = runs_of(tmp_path)
    assert "No growth" in first.data.tags[NOTE]
    assert "No growth" in report_of(first, tmp_path)
    assert "grow" in second.data.tags[NOTE].splitlines()[0].lower()
    assert "No growth" not in report_of(second, tmp_path)


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    train(
        """
    with mlflow.start_run():
        kept = leak()
        raise RuntimeError("boom")
    """,
        tmp_path,
        1,
    )
    (run,) = runs_of(tmp_path)
    assert run.info.status == "FAILED"
    assert "| Run | failed, 120 steps" in run.data.tags[NOTE]


def test_a_description_of_the_users_stays(tmp_path: Path) -> None:
    train(
        """
    for number in range(2):
        with mlflow.start_run(description="my own words" if number == 0 else None) as run:
            leak(30)
    client = mlflow.MlflowClient()
    note = client.get_run(run.info.run_id).data.tags["mlflow.note.content"]
    client.set_tag(run.info.run_id, "mlflow.note.content", note + " And mine.")
    """,
        tmp_path,
    )
    first, second = runs_of(tmp_path)
    assert first.data.tags[NOTE] == "my own words"
    assert second.data.tags[NOTE].endswith(" And mine.")


def test_a_store_that_hangs_delays_the_end_by_a_second(tmp_path: Path) -> None:
    train(
        """
    import sqlite3

    protocol.SETTLED_WITHIN = 1.0
    mlflow.start_run()
    kept = leak()
    lock = sqlite3.connect("mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")  # the helper process waits for the database
    begun = time.monotonic()
    session._live._before_end("mlflow", mlflow.active_run().info.run_id, "finished")
    took = time.monotonic() - begun
    lock.execute("ROLLBACK")
    assert took < 30, took
    """,
        tmp_path,
    )
    (run,) = runs_of(tmp_path)
    assert "`kept`" in run.data.tags[NOTE]
