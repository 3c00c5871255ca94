"""W&B's sink and store keep the contracts, with the real SDK against a double of W&B's server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
import wandb
from msgspec.structs import replace
from support.stores import run_with_files
from support.wandb_server import WandbServer

from memlog.events import Status
from memlog.sink import ArtifactStore, Connection, InProcessRun, Sink, Target, TrackerRun
from memlog.testing import ArtifactStoreContract, Row, Shown, SinkContract, Time
from memlog_wandb import WandbBackend
from memlog_wandb.sink import WandbSink, _OpenRun

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STATUSES: dict[int | None, Status] = {0: "finished", 1: "failed", 255: "killed"}
USERS = "users"
AXES = ("memlog/step", "memlog/evaluation", "memlog/epoch")


def axis_of(name: str) -> str:
    """Axis on which a metric of memlog's lies."""
    part = {"eval": "evaluation", "epoch": "epoch"}
    return f"memlog/{part.get(name.split('/')[1] if '/' in name else '', 'step')}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WandbServer]:
    """Start the only server that wandb's own process knows, and keep wandb's files in a new folder."""
    folder = tmp_path_factory.mktemp("wandb")
    with WandbServer() as made, pytest.MonkeyPatch.context() as process:
        process.chdir(folder)
        for name, value in made.environment.items():
            process.setenv(name, value)
        process.setenv("WANDB_SILENT", "true")
        process.setenv("WANDB_DIR", str(folder))
        process.setattr(_OpenRun, "_open", 1)  # so that no sink ends wandb's own process
        yield made
        wandb.teardown()


@pytest.fixture
def server(running: WandbServer) -> WandbServer:
    """The server without runs."""
    running.forget()
    return running


@contextmanager
def stopped(server: WandbServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


def values_in(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield memlog's values in a run's rows."""
    for row in rows:
        for name, value in row.items():
            if not name.startswith("_") and name not in {USERS, *AXES}:
                yield name, value, row


class TestWandb(SinkContract):
    in_process = True
    cannot_show: ClassVar[Mapping[Shown, str]] = {
        "ends": "W&B knows no other end of a run than the moment at which it is told",
    }

    # For a sink, it is the failure of a call that was executed. `TestTheSinkInMemory` runs the test.
    test_an_odd_error_of_any_call_loses_nothing = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _server(self, server: WandbServer) -> Iterator[None]:
        self.server = server
        self.backend = WandbBackend()
        self.sinks: list[WandbSink] = []
        yield
        wandb.finish()
        self.process_ends()

    def open_sink(self, target: Target) -> Sink:
        connection = Connection(self.server.url, self.server.environment)
        sink = self.backend.open_sink(replace(target, connection=connection))
        assert isinstance(sink, WandbSink)
        self.sinks.append(sink)
        return sink

    def user_run(self) -> TrackerRun:
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        wandb.init(project="p", settings=quiet)
        run = self.backend.active_run()
        assert run is not None
        return run

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        return self.backend.open_in_process(run)

    def user_logs(self, run: TrackerRun, value: float) -> None:  # noqa: ARG002 - there is one
        wandb.log({USERS: value})

    def user_ends(self, run: TrackerRun) -> None:  # noqa: ARG002 - there is one
        wandb.finish()

    def user_values(self, run_id: str) -> Sequence[float]:
        return [row[USERS] for row in self.server.runs[run_id].rows if USERS in row]

    def rows(self, run_id: str) -> Sequence[Row]:
        return [
            (name, int(row[axis_of(name)]), float(value))
            for name, value, row in values_in(self.server.runs[run_id].rows)
        ]

    def times(self, run_id: str) -> Sequence[Time]:
        return [
            (name, int(row[axis_of(name)]), int(row["_timestamp"] * 1e6 + 0.5) // 1000)
            for name, _, row in values_in(self.server.runs[run_id].rows)
        ]

    def parameters(self, run_id: str) -> Mapping[str, str]:
        held = self.server.runs[run_id].config
        return {key.removeprefix("memlog/"): value for key, value in held.items()}

    def alerts(self, run_id: str) -> Sequence[str]:
        return [alert["title"] for alert in self.server.alerts if alert["runName"] == run_id]

    def files(self, run_id: str) -> Mapping[tuple[str, str], bytes]:
        found = {}
        for held in self.server.artifacts:  # a later version replaces an earlier one
            if held.run == run_id and held.state == "COMMITTED":
                metadata = json.loads(held.metadata or "{}")
                content = self.server.blobs[held.files[metadata["memlog_name"]]]
                found[metadata["memlog_kind"], metadata["memlog_name"]] = content
        return found

    def status(self, run_id: str) -> Status | None:
        held = self.server.runs[run_id]
        return STATUSES[held.exit_code] if held.complete else None

    def down(self) -> AbstractContextManager[None]:
        return stopped(self.server)

    def process_ends(self) -> None:
        for sink in self.sinks:
            if sink._run is not None:
                sink._run.run.finish()
        _OpenRun._open = 1
        self.sinks.clear()


class TestWandbsStore(ArtifactStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: WandbServer, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.server = server
        self.backend = WandbBackend()
        self.connection = Connection(server.url, server.environment)
        self.folder = tmp_path_factory.mktemp("files")

    def open_store(self) -> ArtifactStore:
        return self.backend.open_store(self.connection)

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        sink = self.backend.open_sink(Target("contract", None, connection=self.connection))
        return run_with_files(sink, files, self.folder)

    def unknown_run(self) -> str:
        return "nobody"

    def down(self) -> AbstractContextManager[None]:
        return stopped(self.server)
