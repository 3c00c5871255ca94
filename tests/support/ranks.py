"""Runs of the ranks of a real training, and the one MLflow run that all ranks share."""

import json
import time
from pathlib import Path
from typing import Any

from memlog.journal import RunDirectory, list_runs
from memlog.ranks.registration import registration_of


def ranks(folder: Path) -> dict[int, RunDirectory]:
    """Runs below a working directory, by rank."""
    runs = list_runs(folder / "memlog_runs")
    return {found.place.rank: run for run in runs if (found := registration_of(run)) is not None}


def wait_for_end_of(run: RunDirectory) -> None:
    """Wait until the run's uploader has delivered everything."""
    state, deadline = run.delivery / "mlflow.json", time.monotonic() + 60
    while not state.exists() or json.loads(state.read_text())["stage"] != "done":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def only_run(store: str) -> Any:
    """MLflow's client, and the only run in a store."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    [found] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return client, found
