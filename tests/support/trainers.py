"""Contents of the trackers after a training."""

from dataclasses import dataclass
from pathlib import Path

from support.wandb_file import is_memlogs

Row = tuple[str, int, float]
"""Metric, step and value."""
_OF_TIME = ("runtime", "per_second", "step_time")
"""Parts of names of metrics whose values are times, which differ from run to run."""


@dataclass
class MlflowRun:
    name: str
    status: str
    rows: list[Row]

    def users_rows(self) -> list[Row]:
        """The trainer's own rows, without metrics of time."""
        return [row for row in self.rows if not is_memlogs(row[0]) and not of_time(row[0])]

    def steps(self, metric: str) -> list[int]:
        """Steps of a metric's rows. A step with several rows is there several times."""
        return [step for name, step, _ in self.rows if name == metric]


def of_time(metric: str) -> bool:
    return any(part in metric for part in _OF_TIME)


def mlflow_runs(folder: Path) -> list[MlflowRun]:
    """Every run in a folder's store, the oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = []
    for run in client.search_runs(experiments, order_by=["attributes.start_time"]):
        histories = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
        rows = sorted((one.key, one.step, one.value) for history in histories for one in history)
        found.append(MlflowRun(run.info.run_name, run.info.status, rows))
    return found
