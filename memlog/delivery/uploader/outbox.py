"""Sending what a tracker is to get besides points: alerts and files.

The uploader takes them over from the journal together with its position, so that they are neither lost nor
dependent on the points; here each is crossed off once the tracker has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from memlog.delivery.uploader.artifact_files import Copies
from memlog.errors import RunRefusedError, TrackerRejectedError
from memlog.events import Alert, Artifact
from memlog.journal.delivery_state import MAX_ALERTS, AlertsTold, Outbox, Outgoing
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
    outbox: Outbox,
    copies: Copies,
    sink: OpenedSink,
    crossed_off: Callable[[Counter[str]], None],
    refused: Callable[[str | None, RunRefusedError], None],
) -> None:
    """Sends what the outbox holds.

    Args:
        outbox: What is to be sent; loses what was.
        copies: Hands over the files.
        sink: The open sink of a target.
        crossed_off: Called after each thing, with what was lost of it, by reason.

        refused: Called where the tracker refuses a target: what is for it stays.

    Raises:
        TrackerUnavailableError: the rest must wait.
    """
    for target, told in outbox.alerts.items():
        if told.told < len(told.alerts):
            try:
                crossed_off(_show_alerts(sink(target or None), told))
            except RunRefusedError as error:
                refused(target or None, error)
    for outgoing in list(outbox.artifacts):
        try:
            lost = _store(sink, outgoing, copies)
        except RunRefusedError as error:  # noqa: PERF203 - others are not refused
            refused(outgoing.target, error)
        else:
            outbox.artifacts.remove(outgoing)
            crossed_off(lost)


def _show_alerts(sink: Sink, told: AlertsTold) -> Counter[str]:
    lost: Counter[str] = Counter()
    try:
        sink.log_alerts(told.alerts, told.told)
    except RunRefusedError:
        raise
    except TrackerRejectedError:
        lost["alerts_rejected"] = len(told.alerts) - told.told
    told.told = len(told.alerts)
    return lost


def _store(sink: OpenedSink, outgoing: Outgoing, copies: Copies) -> Counter[str]:
    artifact, lost = outgoing.artifact, Counter[str]()
    if not copies.have(artifact):
        return Counter({"artifact_missing": 1})
    opened = sink(outgoing.target)
    file = copies.of(artifact, in_place=getattr(opened, "keeps_files", False))
    if file is None:
        return Counter({"artifact_missing": 1})
    try:
        opened.log_artifact(artifact, file)
    except RunRefusedError:
        raise
    except TrackerRejectedError:
        lost["artifact_rejected"] = 1
    copies.drop()
    return lost
