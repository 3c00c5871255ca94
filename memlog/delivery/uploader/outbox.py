"""Outbox of alerts and files for a tracker.

The uploader copies alerts and files from the journal to the outbox, and continues to read the journal. The
uploader saves the outbox together with the position in the journal. The uploader removes a file from the
outbox when the tracker has the file. Alerts stay, because each call of `Sink.log_alerts` gets all alerts of
the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from memlog.delivery.uploader.artifact_files import ArtifactFiles
from memlog.errors import RunRefusedError, TrackerRejectedError
from memlog.events import Alert, Artifact
from memlog.journal.delivery_state import MAX_ALERTS, Outbox, Outgoing, RunAlerts
from memlog.sink import Sink

OpenedSink = Callable[[str | None], Sink]
OWN = ""
"""Key of memlog's own run in `Outbox.alerts`."""


def take_over(
    outbox: Outbox, target: str | None, alerts: Sequence[Alert], artifacts: Sequence[Artifact]
) -> None:
    """Put alerts and files for one of the tracker's runs into the outbox."""
    if alerts:
        waiting = outbox.alerts.setdefault(target or OWN, RunAlerts())
        waiting.alerts += alerts
        too_many = max(len(waiting.alerts) - MAX_ALERTS, 0)
        del waiting.alerts[:too_many]
        waiting.sent = max(waiting.sent - too_many, 0)
    for artifact in artifacts:
        # A later file of the same name has already replaced the earlier file in the run's folder.
        outbox.artifacts = [
            other
            for other in outbox.artifacts
            if (other.target, other.artifact.name) != (target, artifact.name)
        ]
        outbox.artifacts.append(Outgoing(target, artifact))


def send(
    outbox: Outbox,
    artifact_files: ArtifactFiles,
    sink: OpenedSink,
    sent: Callable[[Counter[str]], None],
    refused: Callable[[str | None, RunRefusedError], None],
) -> None:
    """Send the alerts and files in the outbox. Remove the sent files, and mark the sent alerts.

    ``sent`` is called after each sent file, and after the alerts of each run. Its argument is the number of
    lost items, by reason. ``refused`` is called if the tracker refuses a target's run. The run's alerts and
    files then stay in the outbox.

    Raises:
        TrackerUnavailableError: the tracker can't be reached; the other items stay in the outbox.
    """
    for target, waiting in outbox.alerts.items():
        if waiting.sent < len(waiting.alerts):
            try:
                sent(_show_alerts(sink(target or None), waiting))
            except RunRefusedError as error:
                refused(target or None, error)
    for outgoing in list(outbox.artifacts):
        try:
            lost = _store(sink, outgoing, artifact_files)
        except RunRefusedError as error:  # noqa: PERF203 - others are not refused
            refused(outgoing.target, error)
        else:
            outbox.artifacts.remove(outgoing)
            sent(lost)


def _show_alerts(sink: Sink, waiting: RunAlerts) -> Counter[str]:
    lost: Counter[str] = Counter()
    try:
        sink.log_alerts(waiting.alerts, waiting.sent)
    except RunRefusedError:
        raise
    except TrackerRejectedError:
        lost["alerts_rejected"] = len(waiting.alerts) - waiting.sent
    waiting.sent = len(waiting.alerts)
    return lost


def _store(sink: OpenedSink, outgoing: Outgoing, artifact_files: ArtifactFiles) -> Counter[str]:
    artifact, lost = outgoing.artifact, Counter[str]()
    opened = sink(outgoing.target)
    file = artifact_files.of(artifact, in_place=getattr(opened, "keeps_files", False))
    if file is None:
        return Counter({"artifact_missing": 1})
    try:
        opened.log_artifact(artifact, file)
    except RunRefusedError:
        raise
    except TrackerRejectedError:
        lost["artifact_rejected"] = 1
    artifact_files.drop()
    return lost
