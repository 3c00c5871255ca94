"""Filter out metric rows that a run already has, for stores that would store them twice.

MLflow's databases ignore an exact duplicate. MLflow's folder of text files appends every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mlflow import MlflowClient
from mlflow.entities import Metric

_Row: TypeAlias = tuple[int, int, str]


class StoredRows:
    """Rows that a run has in its store. The rows of each metric are read from the store only once.

    Args:
        client: Client of the run's store.
        run_id: Id of the run.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._rows: dict[str, set[_Row]] = {}

    def missing(self, metrics: Sequence[Metric]) -> list[Metric]:
        """Return the metrics that are not stored yet, without duplicates."""
        found = {
            (metric.key, _row(metric)): metric
            for metric in metrics
            if _row(metric) not in self._stored(metric.key)
        }
        return list(found.values())

    def add(self, metrics: Sequence[Metric]) -> None:
        """Remember that the store has ``metrics``."""
        for metric in metrics:
            self._stored(metric.key).add(_row(metric))

    def forget(self) -> None:
        """Forget all rows after a batch failed. `missing` then reads the rows from the store again."""
        self._rows.clear()

    def _stored(self, key: str) -> set[_Row]:
        if key not in self._rows:
            history = self._client.get_metric_history(self._run_id, key)
            self._rows[key] = {_row(metric) for metric in history}
        return self._rows[key]


def _row(metric: Metric) -> _Row:
    # As text, because a NaN does not equal itself.
    return (int(metric.step), int(metric.timestamp), repr(float(metric.value)))
