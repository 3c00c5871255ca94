"""Runs of the ranks of a real training, and the one MLflow run that all ranks share."""

from pathlib import Path
from typing import Any

from memlog.journal import RunDirectory, list_runs
from memlog.ranks.registration import registration_of
from support.truth import wait_until_delivered


def ranks(folder: Path) -> dict[int, RunDirectory]:
    runs = list_runs(folder / "memlog_runs")
    return {found.position.rank: run for run in runs if (found := registration_of(run)) is not None}


def wait_for_end_of(run: RunDirectory) -> None:
    """Wait until the run's uploader has delivered everything."""
    wait_until_delivered(run.path.parent, seconds=60, run_id=run.id)


def only_run(store: str) -> Any:
    """MLflow's client, and the only run in a store."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    [found] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return client, found
