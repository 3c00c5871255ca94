"""Alerts and files that wait for a tracker.

Other processes may write to a run's folder. After memlog has checked a file, another process could replace
the file by a link before the client opens its path. So the client gets a private copy of the checked file.

The uploader copies alerts and files from the journal to the outbox, and continues to read the journal. The
uploader saves the outbox together with the position in the journal. The uploader removes a file from the
outbox when the tracker has the file. Alerts stay, because each call of `Sink.log_alerts` gets all alerts of
the run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from memlog.errors import RunRefusedError, TrackerRejectedError
from memlog.events import Alert, Artifact
from memlog.journal import RunDirectory
from memlog.journal.artifacts import open_artifact, safe_name
from memlog.journal.delivery_state import MAX_ALERTS, Outbox, Outgoing, RunAlerts
from memlog.sink import Sink

_CHUNK = 1024**2
_SHARE = 2
"""Divisor of the file system's free bytes. If a file is larger than the result, memlog makes no copy."""


class ArtifactFiles:
    """Private copies of a run's artifact files. At most one copy exists at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._made: tuple[tuple[object, ...], Path] | None = None
        self._removed: weakref.finalize[..., ArtifactFiles] | None = None

    def of(self, artifact: Artifact, *, in_place: bool) -> Path | None:
        """Return a path for the client; ``None`` if the file is not a plain file in the run's own folder.

        The path leads to a copy. If the disk has no room for a copy, the path leads to the file itself. The
        copy stays until `drop`, so that the client can continue an interrupted upload. With ``in_place``, the
        path always leads to the file itself, because the client opens it much later.
        """
        file = open_artifact(self._run, artifact)
        if file is None:
            return None
        with file:
            copy = None if in_place else self._copy(file, artifact)
        return copy or self._run.path / artifact.path

    def drop(self) -> None:
        """Remove the copy. Call it when the tracker has the file."""
        self._made = None
        if self._removed is not None:
            self._removed()

    def _copy(self, file: BinaryIO, artifact: Artifact) -> Path | None:
        status = os.fstat(file.fileno())
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        known = (artifact.path, artifact.name, *identity)
        if self._made is not None and self._made[0] == known:
            return self._made[1]
        self.drop()
        try:
            folder = tempfile.mkdtemp(prefix="memlog-")
            self._removed = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder) / safe_name(artifact.name)
            if status.st_size <= shutil.disk_usage(folder).free // _SHARE:
                with path.open("xb") as copy:
                    shutil.copyfileobj(file, copy, _CHUNK)
                self._made = known, path
                return path
        except OSError:
            pass  # for example, the disk is full; `of` then returns the path of the run's own file
        self.drop()
        return None


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
    # A copy, because the loop removes sent files from the list.
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
