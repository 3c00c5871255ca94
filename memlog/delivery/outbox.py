"""Sending what a tracker is to get besides points: alerts and files.

The courier takes them over from the journal together with its position, so that they are neither lost nor
dependent on the points; here each is crossed off once the tracker has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from memlog.delivery.state import MAX_ALERTS, AlertsTold, Outbox, Outgoing
from memlog.errors import TrackerRejectedError
from memlog.events import Alert, Artifact
from memlog.journal import RunDirectory
from memlog.sink import Sink

OpenedSink = Callable[[str | None], Sink]
_OWN = ""


def take_over(
    outbox: Outbox, target: str | None, alerts: Sequence[Alert], artifacts: Sequence[Artifact]
) -> None:
    """Puts alerts and files of one of the tracker's runs into the outbox."""
    if alerts:
        told = outbox.alerts.setdefault(target or _OWN, AlertsTold())
        told.alerts += alerts
        too_many = max(len(told.alerts) - MAX_ALERTS, 0)
        del told.alerts[:too_many]
        told.told = max(told.told - too_many, 0)
    for artifact in artifacts:
        # A later file of the same name has taken the place of an earlier one, in the run's folder too.
        outbox.artifacts = [
            other
            for other in outbox.artifacts
            if (other.target, other.artifact.name) != (target, artifact.name)
        ]
        outbox.artifacts.append(Outgoing(target, artifact))


def send(
    outbox: Outbox, run: RunDirectory, sink: OpenedSink, crossed_off: Callable[[Counter[str]], None]
) -> None:
    """Sends what the outbox holds.

    Args:
        outbox: What is to be sent; loses what was.
        run: Where the files are.
        sink: The open sink of a target.
        crossed_off: Called after each thing, with what was lost of it, by reason.

    Raises:
        TrackerUnavailableError: the rest must wait.
    """
    for target, told in outbox.alerts.items():
        if told.told < len(told.alerts):
            crossed_off(_show_alerts(sink(target or None), told))
    while outbox.artifacts:
        lost = _store(sink, outbox.artifacts[0], run)
        del outbox.artifacts[0]
        crossed_off(lost)


def _show_alerts(sink: Sink, told: AlertsTold) -> Counter[str]:
    lost: Counter[str] = Counter()
    try:
        sink.log_alerts(told.alerts, told.told)
    except TrackerRejectedError:
        lost["alerts_rejected"] = len(told.alerts) - told.told
    told.told = len(told.alerts)
    return lost


def _store(sink: OpenedSink, outgoing: Outgoing, run: RunDirectory) -> Counter[str]:
    file = file_of(outgoing.artifact, run)
    if file is None:
        return Counter({"artifact_missing": 1})
    try:
        sink(outgoing.target).log_artifact(outgoing.artifact, file)
    except TrackerRejectedError:
        return Counter({"artifact_rejected": 1})
    return Counter()


def file_of(artifact: Artifact, run: RunDirectory) -> Path | None:
    """The file, where it is a plain one in the run's own folder: a journal may come from anywhere."""
    path = run.path / artifact.path
    try:
        inside = path.resolve().is_relative_to(run.artifacts.resolve())
        return path if inside and path.is_file() else None
    except (OSError, ValueError):
        return None
