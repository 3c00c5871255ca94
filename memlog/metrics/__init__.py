"""Conversion of events to a tracker's points: the metrics of each event, and the index of each point."""

from __future__ import annotations

from memlog.metrics.points import (
    Plan,
    alert_in_run,
    axis_and_index,
    bucket_start,
    fragmentation,
    in_run,
    is_content,
    parameters_of,
    replaces,
    safe_label,
    sent_values,
    thread_point,
    values,
)

__all__ = [
    "Plan",
    "alert_in_run",
    "axis_and_index",
    "bucket_start",
    "fragmentation",
    "in_run",
    "is_content",
    "parameters_of",
    "replaces",
    "safe_label",
    "sent_values",
    "thread_point",
    "values",
]
