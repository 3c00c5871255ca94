"""Alerts in MLflow: a file with all of them, and tags about the last one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from memlog.events import Alert

ALERTS_FILE = "memlog/alerts.json"
_MAX_TAG = 5000
"""Maximum characters of a tag's value. Every version of MLflow accepts a value of this length."""


def alert_table(alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the content of `ALERTS_FILE`.

    The file is always written as a whole, so writing it again changes nothing.
    """
    return {"alerts": [_row(alert) for alert in alerts]}


def alert_tags(alerts: Sequence[Alert]) -> dict[str, str]:
    """Return two tags with the last alert's title and level, and one tag with the number of alerts.

    Users can search for runs by these tags: ``tags.`memlog.alert.level` = 'error'``.
    """
    last = alerts[-1]
    where = "" if last.where is None else f" ({last.where})"
    return {
        "memlog.alert.last": f"{last.title}{where}"[:_MAX_TAG],
        "memlog.alert.level": last.level,
        "memlog.alert.count": str(len(alerts)),
    }


def _row(alert: Alert) -> dict[str, Any]:
    at = datetime.fromtimestamp(alert.time_us / 1e6, timezone.utc)
    return {
        "time": at.isoformat(timespec="milliseconds"),
        "step": alert.step,
        "evaluation": alert.evaluation,
        "epoch": alert.epoch,
        "level": alert.level,
        "rule": alert.rule,
        "title": alert.title,
        "text": alert.text,
        "value": alert.value,
    }
