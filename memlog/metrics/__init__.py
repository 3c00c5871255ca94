"""Conversion of events to a tracker's points: the metrics of each event, and the index of each point."""

from __future__ import annotations

from memlog.metrics.event_values import (
    alert_in_run,
    axis_and_index,
    fragmentation,
    in_run,
    is_content,
    parameters_of,
    safe_label,
    sent_values,
    values,
)
from memlog.metrics.points import Plan, bucket_start, replaces, thread_point

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
