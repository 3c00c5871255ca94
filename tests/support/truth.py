"""The points that a tracker should have, computed from the journal alone, and those in MLflow."""

import time
from collections import Counter
from pathlib import Path

from memlog.journal import RunDirectory, find_run
from memlog.journal.delivery_state import UploadState
from memlog.metrics import Plan
from memlog.sink import Point, Resolution

Row = tuple[str, int, int, float]
"""A row of MLflow's: name, step, time in ms, value."""


def plan_of(run: RunDirectory, resolution: Resolution = "bucketed", offset: int = 0) -> list[Point]:
    """The plan's points for the whole journal of a run that is over."""
    points: list[Point] = []
    for file in run.files():
        plan: Plan[int] = Plan(resolution, offset=offset)
        for at, entry in enumerate(file.read()):
            points += plan.feed(entry.event, at)
        points += plan.flush()
    return points


def rows_of(points: list[Point]) -> "Counter[Row]":
    return Counter((p.name, p.index, p.time_us // 1000, p.value) for p in points)


def rows_in_mlflow(uri: str, run_id: str) -> "Counter[Row]":
    """Return every row of memlog's that MLflow has for a run, with its number of copies."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    keys = [key for key in client.get_run(run_id).data.metrics if key.startswith("mem")]
    return Counter(
        (key, metric.step, metric.timestamp, metric.value)
        for key in keys
        for metric in client.get_metric_history(run_id, key)
    )


def wait_until_delivered(
    runs: Path, *, seconds: float = 150, run_id: str = "latest"
) -> UploadState:
    """Wait until a run's uploader has ended, also if the trainer was killed. Return its saved state.

    A test must not open the tracker's database earlier: nobody else can open it while MLflow creates it.
    """
    run = find_run(runs, run_id)
    deadline = time.monotonic() + seconds
    while (state := UploadState.load(run, "mlflow")).stage != "done":
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    return state
