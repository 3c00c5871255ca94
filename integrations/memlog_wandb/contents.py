"""What a run of W&B's gets, the user's or memlog's own: rows, definitions, alerts, artifacts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlog.events import Alert, Artifact
from memlog.sink import Axis, Point
from memlog_wandb.names import artifact_name, artifact_type, cut_title, safe_key

METADATA = "memlog_name"
"""The key in an artifact's metadata under which its name at memlog's stands."""

_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
_ALERT_WAIT = 1
"""Seconds within which W&B passes over an alert of the same title. Zero would mean a minute; how often a
rule may speak is decided by memlog."""


def axis_key(axis: Axis) -> str:
    """The metric that an axis is: memlog's steps are not W&B's."""
    return f"memlog/{axis}"


class Definitions:
    """Tells a run, once a key, which axis it lies on and how it is summed up.

    Exact names alone: where the user, Lightning or Transformers has defined ``*``, W&B picks one of
    several fitting globs at random.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._known: set[str] = set()

    def add(self, points: Iterable[Point]) -> None:
        """Defines what is new, before it is logged for the first time."""
        for point in points:
            axis, key = axis_key(point.axis), safe_key(point.name)
            if axis not in self._known:
                self._known.add(axis)
                self._run.define_metric(axis, hidden=True)
            if key not in self._known:
                self._known.add(key)
                summary = "max" if point.fold == "max" else None
                # A dot would lead into a nested value; escaped, it is a part of the name.
                exact = key.replace(".", "\\.")
                self._run.define_metric(exact, step_metric=axis, summary=summary)


def row_of(points: Sequence[Point]) -> dict[str, Any]:
    """One row: the points' values, and where on their axes the newest of them lie."""
    row: dict[str, Any] = {}
    for point in points:
        axis = axis_key(point.axis)
        row[axis] = max(point.index, row.get(axis, point.index))
        row[safe_key(point.name)] = point.value
    return row


def is_storable(point: Point) -> bool:
    """Whether W&B can show a value: an infinity spoils the chart and its summary's JSON."""
    return math.isfinite(point.value)


def log_parameters(run: Any, parameters: Mapping[str, str]) -> None:
    """Puts parameters into the run's configuration, under ``memlog/``."""
    values = {safe_key(f"memlog/{name}"): value for name, value in parameters.items()}
    run.config.update(values, allow_val_change=True)


def log_alert(run: Any, alert: Alert) -> None:
    """Sends an alert."""
    text = alert.text or alert.rule
    run.alert(
        title=cut_title(alert.title),
        text=text if alert.where is None else f"{text} ({alert.where})",
        level=_LEVELS[alert.level],
        wait_duration=_ALERT_WAIT,
    )


def log_artifact(run: Any, artifact: Artifact, file: Path, memlog_run: str) -> Any:
    """Hands an artifact over, and returns W&B's.

    The file is read where it is, and must stay there until it is uploaded: a copy in W&B's staging
    folder, outside the run's, would be missed by nobody when it disappears.
    """
    import wandb  # noqa: PLC0415 - whoever has a run has imported it

    made = wandb.Artifact(
        artifact_name(run.id, artifact.name),
        type=artifact_type(artifact.kind),
        metadata={"memlog_run": memlog_run, METADATA: artifact.name, "memlog_kind": artifact.kind},
    )
    made.add_file(str(file), name=artifact.name, policy="immutable")
    return run.log_artifact(made)
