"""The contracts of sinks and stores with Trackio, for each place where Trackio can store runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memlog.events import Status
from memlog.sink import ArtifactStore, Connection, Sink, Target, TrackerRun
from memlog.testing import ArtifactStoreContract, Row, SinkContract
from memlog_trackio import backend
from memlog_trackio.addresses import RunAddress
from support.stores import run_with_files
from support.trackio_server import parameters_of, rows_of

NUMBERS = count()
STATUSES: Mapping[str, Status] = {"finished": "finished", "failed": "failed", "killed": "killed"}


class TrackioContract(SinkContract):
    """Contract that reads back with Trackio's client. Each test has a project of its own."""

    connection: Connection
    project: str

    def ask(self, question: str, **arguments: Any) -> Any:
        raise NotImplementedError

    def open_sink(self, target: Target) -> Sink:
        return backend.open_sink(replace(target, project=self.project, connection=self.connection))

    def user_run(self) -> TrackerRun:
        address = RunAddress(str(self.connection.uri), self.project, "users")
        return TrackerRun("a" * 32, str(address), "users")

    def logs(self, run_id: str) -> list[dict[str, Any]]:
        logs: list[dict[str, Any]] = self.ask("get_logs", project=self.project, run_id=run_id)
        return logs

    def rows(self, run_id: str) -> Sequence[Row]:
        return rows_of(self.logs(run_id))

    def parameters(self, run_id: str) -> Mapping[str, str]:
        return parameters_of(self.logs(run_id))

    def alerts(self, run_id: str) -> Sequence[str]:
        held = self.ask("get_alerts", project=self.project, run_id=run_id)
        return [alert["title"] for alert in held]

    def files(self, run_id: str) -> Mapping[tuple[str, str], bytes]:
        known = self.ask("get_runs_for_project", project=self.project)
        name = next(record["name"] for record in known if record["id"] == run_id)
        uri = str(RunAddress(str(self.connection.uri), self.project, name))
        store = backend.open_store(replace(self.connection, uri=uri))
        found = {}
        for artifact in store.list_artifacts(run_id):
            with tempfile.TemporaryDirectory() as folder:
                path = store.fetch(run_id, artifact, Path(folder), lambda _: None)
                found[artifact.kind, artifact.name] = path.read_bytes()
        return found

    def config(self, run_id: str) -> dict[str, Any]:
        configs = self.ask("get_run_configs", project=self.project)
        return dict(configs.get(run_id) or {})

    def status(self, run_id: str) -> Status | None:
        return STATUSES.get(self.config(run_id).get("memlog/status", ""))

    def ended_ms(self, run_id: str) -> int | None:
        ended = datetime.fromisoformat(self.config(run_id)["memlog/ended"])
        return round(ended.timestamp() * 1000)


class TrackioStoreContract(ArtifactStoreContract):
    connection: Connection

    def uri(self) -> str:
        return str(RunAddress(str(self.connection.uri), "stored", "memlog-contract"))

    def open_store(self) -> ArtifactStore:
        return backend.open_store(replace(self.connection, uri=self.uri()))

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        run_name = f"contract{next(NUMBERS)}"
        target = Target(run_name, None, project="stored", connection=self.connection)
        sink = backend.open_sink(target)
        with tempfile.TemporaryDirectory() as folder:
            return run_with_files(sink, files, Path(folder))

    def unknown_run(self) -> str:
        return "0" * 32
