"""Sink for one Trackio run. It runs in a process of memlog's own."""

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

from memlog._internal.diagnostics import Diagnostics
from memlog.errors import TrackerRejectedError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, Resolution, Target, TrackerRun
from memlog_trackio.addresses import RunAddress, link_to, run_address
from memlog_trackio.client import client_for, translated

METADATA = "memlog_name"
"""Key, in an artifact's metadata, of the name that memlog gave it."""
KIND = "memlog_kind"
PARAMETERS = "memlog/parameters"
STATUS, ENDED = "memlog/status", "memlog/ended"
"""Keys in the configuration of memlog's own run. A run of the user's keeps its configuration: Trackio can
only replace a whole one."""

_PROJECT = "memlog"
_LEVELS = {"info": "info", "warning": "warn", "error": "error"}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class TrackioSink:
    """A `memlog.sink.Sink` for Trackio. Its methods raise the errors that the protocol names.

    Each point is a row of its own. The row's id is computed from the point, because Trackio ignores a row
    whose id it has. A row with several points would get another id if they were sent again in other groups.

    Args:
        target: The run to write to.
    """

    durable = True
    resolution: Resolution = "bucketed"
    max_points = 1000

    def __init__(self, target: Target) -> None:
        self._target = target
        self._diagnostics = Diagnostics()
        self._run_id, self._address = _run_of(target)
        self._client = client_for(self._address, target.connection.environment)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Losses by reason; always empty, because Trackio takes every point."""
        return self._diagnostics.dropped

    def probe(self) -> None:
        """Check, for about two seconds, whether Trackio's server or folder can be reached."""
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
        """Store at most `max_points` points. In a folder, each gets its event's time."""
        self._log(
            (
                {_text(point.name): point.value},
                point.index,
                point.time_us,
                (point.name, point.axis, repr(point.value)),
            )
            for point in points
        )

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store parameters as a table."""
        rows = [
            {"name": _text(name), "value": _text(value)}
            for name, value in sorted(parameters.items())
        ]
        if rows:
            table = {"_type": Table.TYPE, "_value": rows}
            self._log([({PARAMETERS: table}, 0, self._begun_us, (PARAMETERS, rows))])

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Store the new alerts as Trackio's own. Its webhooks are not called."""
        entries = [
            {
                **self._common,
                "title": _text(alert.title),
                "text": _text(alert.text or alert.rule),
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
        """Store a file as an artifact that the run has made."""
        project = self._address.project or ""
        digest, size = self._client.store(project, file)
        self._client.commit(
            {
                "project": project,
                "name": _safe(f"{self._run_id}-{artifact.kind}-{artifact.name}"),
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
        """Store how memlog's own run ended in its configuration. Trackio itself knows no end of a run."""
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
        """Replace the configuration of memlog's own run. An empty row carries it: Trackio needs a row."""
        beside = self._target.beside
        group = None if beside is None else run_address(beside.uri or "").run or beside.run_id
        config = {"_Created": _iso(self._begun_us), "_Group": group, **more}
        self._log([({}, 0, self._begun_us, what)], config)

    def _log(
        self,
        rows: Iterable[tuple[dict[str, Any], int, int, object]],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Store rows: values, step, Unix time in microseconds, and the data from which the id is made."""
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
        # A project's runs share one set of ids.
        text = repr((self._run_id, *parts)).encode("utf-8", "backslashreplace")
        return hashlib.blake2s(text, digest_size=16).hexdigest()


def _run_of(target: Target) -> tuple[str, RunAddress]:
    """Return the run's id and address. Those of memlog's own run never change, so that it is found again."""
    known = target.joined or target.opened
    if known is not None:
        address = run_address(known.uri or "")
        if address.project is None or address.run is None:
            raise TrackerRejectedError(
                f"the address of the Trackio run {known.run_id} does not say its project and name"
            )
        return known.run_id, address
    beside = run_address(target.beside.uri if target.beside and target.beside.uri else "")
    location = beside.location or target.connection.uri or ""
    run_id = f"memlog-{target.own_id}"
    if target.beside is not None:
        digest = hashlib.blake2s(target.beside.run_id.encode(), digest_size=4).hexdigest()
        run_id = f"{run_id}-{digest}"
    project = target.project or beside.project or _PROJECT
    return run_id, RunAddress(location, project, target.name or run_id)


def _safe(name: str) -> str:
    """Return a name that Trackio accepts for an artifact; a changed one gets a digest of the original."""
    cleaned = _UNSAFE.sub("-", name)
    digest = hashlib.blake2s(name.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()
    return cleaned if cleaned == name else f"{cleaned}-{digest}"


def _text(text: str) -> str:
    # A lone surrogate has no UTF-8, and a name may come from anywhere.
    return str(text).encode("utf-8", "backslashreplace").decode()


def _iso(time_us: int) -> str:
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds")
