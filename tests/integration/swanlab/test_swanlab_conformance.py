"""SwanLab's sink keeps the contract of all sinks, offline. SwanLab's own reader reads the runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import swanlab
from msgspec.structs import replace
from support.stores import moved_away
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
from swanlab.sdk.internal.core_python.store import DataStoreReader

from memlog.events import Status
from memlog.sink import Connection, Sink, Target, TrackerRun
from memlog.testing import Row, SinkContract, Time
from memlog_swanlab.backend import SwanlabBackend, address_of

pytestmark = pytest.mark.integration

STATUSES: Mapping[RunState, Status] = {
    RunState.RUN_STATE_FINISHED: "finished",
    RunState.RUN_STATE_CRASHED: "failed",
    RunState.RUN_STATE_ABORTED: "killed",
}
USERS = "loss"


def records_in(folder: Path) -> list[Record]:
    (file,) = folder.glob("run-*.swanlab")
    if not file.stat().st_size:  # SwanLab writes what it holds back when the user's run ends
        return []
    reader = DataStoreReader()
    reader.open(file)
    records = [Record.FromString(data) for data in reader]
    reader.close()
    return records


class TestSwanlab(SinkContract):
    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> Iterator[None]:
        self.disk = tmp_path / "disk"
        self.disk.mkdir()
        self.root = self.disk / "swanlog"
        self.backend = SwanlabBackend()
        yield
        if swanlab.has_run():
            swanlab.finish()

    def open_sink(self, target: Target) -> Sink:
        connection = Connection(address_of(self.root))
        return self.backend.open_sink(replace(target, connection=connection))

    def user_run(self) -> TrackerRun:
        settings = swanlab.Settings(
            probe=swanlab.Settings.Probe(hardware=False, monitor=False, git=False),
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
        )
        swanlab.init(mode="offline", log_dir=str(self.root), project="users", settings=settings)
        swanlab.log({USERS: 1.0}, step=0)
        run = self.backend.active_run()
        assert run is not None
        return run

    def down(self) -> AbstractContextManager[None]:
        return moved_away(self.disk)

    def records(self, run_id: str) -> list[tuple[Path, Record]]:
        """Return the records of all sessions of a run, in the order of the sessions."""
        found = []
        for folder in sorted(self.root.glob("run-*-*")):
            records = records_in(folder)
            if records and records[0].start.id == run_id:
                found += [(folder, record) for record in records]
        return found

    def scalars(self, run_id: str) -> list[Any]:
        held = (record.scalar for _, record in self.records(run_id) if record.HasField("scalar"))
        return [scalar for scalar in held if scalar.key != USERS]

    def rows(self, run_id: str) -> Sequence[Row]:
        return [(each.key, each.step, each.value.number) for each in self.scalars(run_id)]

    def times(self, run_id: str) -> Sequence[Time]:
        return [
            (each.key, each.step, each.timestamp.ToMilliseconds()) for each in self.scalars(run_id)
        ]

    def texts(self, run_id: str, beginning: str) -> list[tuple[str, str]]:
        """Return the captions and the contents of texts."""
        return [
            (item.caption, (folder / "media" / "text" / item.filename).read_text())
            for folder, record in self.records(run_id)
            if record.media.key.startswith(beginning)
            for item in record.media.value.items
        ]

    def parameters(self, run_id: str) -> Mapping[str, str]:
        tables = [json.loads(text) for _, text in self.texts(run_id, "memlog/parameters")]
        return {name: value for table in tables for name, value in table.items()}

    def alerts(self, run_id: str) -> Sequence[str]:
        return [caption for caption, _ in self.texts(run_id, "memlog/alerts/")]

    def files(self, run_id: str) -> Mapping[tuple[str, str], bytes]:
        saves = [record.save for _, record in self.records(run_id) if record.save.name]
        named = {save.name: Path(save.source_path) for save in saves}
        assert len(named) == len(saves)
        return {
            (path.parent.name, path.name): path.read_bytes()
            for name, path in named.items()
            if name.startswith("memlog/")
        }

    def ends(self, run_id: str) -> list[Any]:
        return [record.finish for _, record in self.records(run_id) if record.HasField("finish")]

    def status(self, run_id: str) -> Status | None:
        ends = self.ends(run_id)
        return STATUSES[ends[-1].state] if ends else None

    def ended_ms(self, run_id: str) -> int | None:
        return int(self.ends(run_id)[-1].finished_at.ToMilliseconds())
