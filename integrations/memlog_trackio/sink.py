"""Sink for one Trackio run. The sink runs in a process of memlog's own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from trackio.sqlite_storage import SQLiteStorage
from trackio.table import Table
from trackio.utils import serialize_values

from memlog.errors import TrackerRejectedError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, Resolution, Target, TrackerRun, distinct_name, valid_text
from memlog_trackio.addresses import RunAddress, link_to, run_address
from memlog_trackio.client import client_for, translated

METADATA = "memlog_name"
"""Key in an artifact's metadata. Its value is the name that memlog gave the file."""
KIND = "memlog_kind"
PARAMETERS = "memlog/parameters"
STATUS, ENDED = "memlog/status", "memlog/ended"
"""Keys in the configuration of memlog's own run. memlog never changes the configuration of a user's run,
because Trackio can only replace a configuration as a whole."""

_PROJECT = "memlog"
_LEVELS = {"info": "info", "warning": "warn", "error": "error"}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class TrackioSink:
    """A `memlog.sink.Sink` for Trackio. Its methods raise the errors that `Sink` names.

    Each point is a separate row. The row's id is computed from the point. If memlog sends a point again, the
    row has the same id, and Trackio ignores the row.

    Args:
        target: The run to write to.

    Attributes:
        dropped: Points left out so far, by reason; always empty, because Trackio takes every point.
    """

    durable = True
    resolution: Resolution = "bucketed"
    max_points = 1000

    def __init__(self, target: Target) -> None:
        self._target = target
        self.dropped: Mapping[str, int] = {}
        self._run_id, self._address = _run_of(target)
        self._client = client_for(self._address, target.connection.environment)

    def probe(self) -> None:
        """Check whether Trackio's server or folder can be reached. This takes about two seconds at most."""
        self._client.probe()

    def open(self) -> TrackerRun:
        """Find the user's run, or make memlog's own by storing an empty row."""
        with translated():
            SQLiteStorage.validate_project_name(self._address.project or "")
        self.probe()
        if self._target.joined is None:
            self._configure("begun", {})
        return TrackerRun(
            self._run_id, str(self._address), self._address.run, link_to(self._address)
        )

    def log_points(self, points: Sequence[Point]) -> None:
        """Store points. In a folder, a row gets the time of its event. A server uses the time of arrival.

        Args:
            points: At most `max_points` points.
        """
        self._log(
            (
                {valid_text(point.name): point.value},
                point.index,
                point.time_us,
                (point.name, point.axis, repr(point.value)),
            )
            for point in points
        )

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store parameters as a table."""
        rows = [
            {"name": valid_text(name), "value": valid_text(value)}
            for name, value in sorted(parameters.items())
        ]
        if rows:
            table = {"_type": Table.TYPE, "_value": rows}
            self._log([({PARAMETERS: table}, 0, self._begun_us, (PARAMETERS, rows))])

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Store the new alerts as Trackio's alerts. Trackio's webhooks are not called."""
        entries = [
            {
                **self._common,
                "title": valid_text(alert.title),
                "text": valid_text(alert.text or alert.rule),
                "level": _LEVELS[alert.level],
                "step": alert.step,
                "timestamp": _iso(alert.time_us),
                "alert_id": self._id(alert.time_us, alert.rule, alert.title, alert.where),
            }
            for alert in alerts[first_new:]
        ]
        if entries:
            self._client.alert(entries)

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Store a file as an output artifact of the run."""
        project = self._address.project or ""
        digest, size = self._client.store(project, file)
        name = f"{self._run_id}-{artifact.kind}-{artifact.name}"
        self._client.commit(
            {
                "project": project,
                "name": distinct_name(name, _UNSAFE.sub("-", name)),
                "type": artifact.kind,
                "description": None,
                "metadata": {METADATA: artifact.name, KIND: artifact.kind},
                "manifest": [{"path": artifact.name, "digest": digest, "size": size}],
                "aliases": None,
                "run_name": self._address.run,
                "run_id": self._run_id,
                "overwrite": True,
            }
        )

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Store the status and end time of memlog's own run in the run's configuration.

        Trackio has no fields for a run's status and end time.
        """
        if self._target.joined is None and status is not None:
            now = (datetime.now(timezone.utc) - _EPOCH) // timedelta(microseconds=1)
            ended = _iso(now if ended_us is None else ended_us)
            self._configure("ended", {STATUS: status, ENDED: ended})

    @property
    def _begun_us(self) -> int:
        return self._target.begun_us or 0

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "project": self._address.project,
            "run": self._address.run,
            "run_id": self._run_id,
        }

    def _configure(self, what: str, more: Mapping[str, str]) -> None:
        """Replace the configuration of memlog's own run.

        Trackio accepts a configuration only together with a row, so an empty row is stored, too.

        Args:
            what: Text from which the row's id is made.
            more: Entries to add to the usual configuration.
        """
        beside = self._target.beside
        group = None if beside is None else run_address(beside.uri or "").run or beside.run_id
        config = {"_Created": _iso(self._begun_us), "_Group": group, **more}
        self._log([({}, 0, self._begun_us, what)], config)

    def _log(
        self,
        rows: Iterable[tuple[dict[str, Any], int, int, object]],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Store rows.

        Args:
            rows: Values, step, Unix time in microseconds, and the data from which the row's id is made.
            config: New configuration of the run; ``None``: the configuration is not changed.
        """
        entries = [
            {
                **self._common,
                "metrics": serialize_values(values),  # type: ignore[no-untyped-call]  # trackio does not type it
                "step": step,
                "timestamp": _iso(time_us),
                "config": config,
                "log_id": self._id(step, time_us, identity),
            }
            for values, step, time_us, identity in rows
        ]
        if entries:
            self._client.log(entries)

    def _id(self, *parts: object) -> str:
        # An id must be unique in its project, so it is also made from the run's id.
        text = repr((self._run_id, *parts)).encode("utf-8", "backslashreplace")
        return hashlib.blake2s(text, digest_size=16).hexdigest()


def _run_of(target: Target) -> tuple[str, RunAddress]:
    """Return the id and address of the run to write to.

    For memlog's own run they depend on ``target`` only, so a later process finds the run again.
    """
    known = target.joined or target.opened
    if known is not None:
        address = run_address(known.uri or "")
        if address.project is None or address.run is None:
            raise TrackerRejectedError(
                f"the address of the Trackio run {known.run_id} lacks its project or name"
            )
        return known.run_id, address
    beside = run_address(target.beside.uri if target.beside and target.beside.uri else "")
    location = beside.location or target.connection.uri or ""
    run_id = f"memlog-{target.id_with_beside}"
    project = target.project or beside.project or _PROJECT
    return run_id, RunAddress(location, project, target.name or run_id)


def _iso(time_us: int) -> str:
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds")
