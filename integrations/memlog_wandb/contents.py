"""Rows, metric definitions, alerts and artifacts for a W&B run, the user's or memlog's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlog.events import Alert, Artifact
from memlog.sink import Axis, Point
from memlog_wandb.names import artifact_name, artifact_type, cut_title, safe_key

REPORT_KEY = "memlog/report"
"""Key in the run's summary. Its value is memlog's report, an HTML page that W&B shows."""
METADATA = "memlog_name"
"""Key in an artifact's metadata. Its value is the name that memlog gave the file."""

_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
_ALERT_WAIT = 1
"""Seconds after an alert during which W&B drops alerts with the same title. The time is short, because
memlog itself limits how often a rule fires. The time is not zero, because W&B treats zero as one minute."""


def axis_key(axis: Axis) -> str:
    """Return the key under which a row has its step, evaluation or epoch.

    W&B's own step is a different number: the number of the row.
    """
    return f"memlog/{axis}"


class Definitions:
    """Definitions of a run's metrics.

    A definition names a metric's axis, and the value that W&B shows in the run's summary: maximum or last.
    Each definition is sent one time, with the exact name of its metric. memlog defines no glob. If
    several globs match a name, W&B uses one of them at random. The user, Lightning or Transformers may
    already have defined the glob ``*``.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._known: set[str] = set()

    def add(self, points: Iterable[Point]) -> None:
        """Define the new metrics of ``points``. Call this method before the points are logged."""
        for point in points:
            axis, key = axis_key(point.axis), safe_key(point.name)
            if axis not in self._known:
                self._known.add(axis)
                self._run.define_metric(axis, hidden=True)
            if key not in self._known:
                self._known.add(key)
                summary = "max" if point.fold == "max" else None
                # An unescaped dot would mean a nested value.
                exact = key.replace(".", "\\.")
                self._run.define_metric(exact, step_metric=axis, summary=summary)


def row_of(points: Sequence[Point]) -> dict[str, Any]:
    """Return one row: the points' values, and the newest step, evaluation and epoch of the points."""
    row: dict[str, Any] = {}
    for point in points:
        axis = axis_key(point.axis)
        row[axis] = max(point.index, row.get(axis, point.index))
        row[safe_key(point.name)] = point.value
    return row


def is_storable(point: Point) -> bool:
    """Return True if W&B can show the value. An infinity breaks the chart and the JSON of the summary."""
    return math.isfinite(point.value)


def log_parameters(run: Any, parameters: Mapping[str, str]) -> None:
    """Put parameters into the run's configuration, under ``memlog/``."""
    values = {safe_key(f"memlog/{name}"): value for name, value in parameters.items()}
    run.config.update(values, allow_val_change=True)


def log_alert(run: Any, alert: Alert) -> None:
    """Send an alert."""
    text = alert.text or alert.rule
    run.alert(
        title=cut_title(alert.title),
        text=text if alert.where is None else f"{text} ({alert.where})",
        level=_LEVELS[alert.level],
        wait_duration=_ALERT_WAIT,
    )


def log_artifact(run: Any, artifact: Artifact, file: Path, memlog_run: str) -> Any:
    """Log an artifact, and return W&B's object for it.

    W&B reads the file at its path, so the file must stay there until it is uploaded. memlog does not let W&B
    copy it to W&B's staging folder, which is outside the run's folder and may be cleaned up.
    """
    import wandb  # noqa: PLC0415 - imported already, since there is a run

    made = wandb.Artifact(
        artifact_name(run.id, artifact.name),
        type=artifact_type(artifact.kind),
        metadata={"memlog_run": memlog_run, METADATA: artifact.name, "memlog_kind": artifact.kind},
    )
    made.add_file(str(file), name=artifact.name, policy="immutable")
    if artifact.is_report:
        # The report goes into the summary, because a logged report would be a row among the user's rows.
        run.summary[REPORT_KEY] = wandb.Html(str(file), inject=False)
    return run.log_artifact(made)
