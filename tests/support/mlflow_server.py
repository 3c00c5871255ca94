"""Shared parts of the MLflow integration's tests: servers on loopback, stores, sinks and points.

The servers are a real ``mlflow server``, which may be killed and started again on the same port, and a
small one that answers everything with one status.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memlog.sink import Connection, Point, Target, TrackerRun
from memlog_mlflow import backend
from support import child
from support.servers import answers, wait_until_up

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from memlog_mlflow.sink import MlflowSink

MEMLOG_RUN = "20261121-101500-a1b2c3"
START_US = 1_795_000_000_000_000

IN_PROCESS = [
    pytest.mark.integration,
    pytest.mark.usefixtures("without_mlflows_environment"),
    # A warning of SQLAlchemy 2.1 about MLflow 3.17's own models.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
"""Marks of tests that call MLflow in this process."""


def free_port() -> int:
    """A port on loopback on which no process listens and which the system gives to no client.

    The port lies below the system's range of ports for clients. Each of pytest's workers has its own ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = next(_PORTS) + 1000 * worker
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


_PORTS = itertools.cycle(range(20_000, 21_000))


class MlflowServer:
    """A server, by default of an SQLite database in ``root``, with its artifacts beside it."""

    def __init__(
        self,
        root: Path,
        store: str | None = None,
        artifacts: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.root = root
        self._store = store or f"sqlite:///{root}/server.db"
        self._made_here = None if store else root / "server.db"
        self._artifacts = artifacts or f"{root}/artifacts"
        self._added = dict(environment or {})
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the server, on the same port as the first time, and wait until it answers."""
        if self._made_here and not self._made_here.exists():
            self._made_here.write_bytes(_empty_store())
        with (self.root / "server.log").open("ab") as log:
            self._process = child.start_program(
                Path(__file__).with_name("mlflow_serve.py"),
                *self._arguments(),
                directory=self.root,
                environment=self._environment(),
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
        health = f"{self.url}/health"
        wait_until_up(self._process, lambda: answers(health), self.root / "server.log")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the server and all its workers. A second call does nothing."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _arguments(self) -> list[str]:
        return [
            *("server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--workers", "1"),
            *("--backend-store-uri", self._store),
            *("--artifacts-destination", self._artifacts),
        ]

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        return {
            **inherited,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **self._added,
        }


@contextlib.contextmanager
def running_mlflow_server(
    root: Path,
    store: str | None = None,
    artifacts: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[MlflowServer]:
    server = MlflowServer(root, store, artifacts, environment)
    server.start()
    try:
        yield server
    finally:
        server.kill(signal.SIGTERM)


class Answering(ThreadingHTTPServer):
    """A small server that answers every request with one status and remembers the requests."""

    daemon_threads = True

    def __init__(self, status: int) -> None:
        self.status = status
        self.body = b"<html>no</html>"
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = self.server.body
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "3600")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        ...


@contextlib.contextmanager
def answering_server() -> Iterator[Answering]:
    """A small server that answers 200 until a test sets its ``status``."""
    with Answering(200) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


@contextlib.contextmanager
def environment_without_mlflow() -> Iterator[None]:
    """Remove MLflow's variables inside the block. After the block, remove those that a sink has set in it."""
    saved = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def sqlite_store(folder: Path) -> str:
    """The URI of an SQLite store of a test's own."""
    (folder / "mlflow.db").write_bytes(_empty_store())
    return f"sqlite:///{folder}/mlflow.db"


@functools.cache
def _empty_store() -> bytes:
    """A database with MLflow's empty tables. Creating them takes seconds.

    MLflow's warnings are suppressed here. Otherwise they would appear in the first test that needs a store.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return (Path(folder) / "mlflow.db").read_bytes()


def sink_for(uri: str, joined: str | None = None, project: str | None = None) -> MlflowSink:
    """A sink as the helper builds it, for the run ``joined`` or for a run that the sink opens."""
    from memlog_mlflow.sink import MlflowSink

    run = None if joined is None else TrackerRun(joined, uri)
    connection = Connection(uri=uri)
    sink = backend.open_sink(Target(MEMLOG_RUN, joined=run, project=project, connection=connection))
    assert isinstance(sink, MlflowSink)
    return sink


def points(count: int, first: int = 0) -> list[Point]:
    return [
        Point("memory/host/rss_mib", 100.0 + step, "step", step, START_US + step * 1500)
        for step in range(first, first + count)
    ]


def rss_rows(client: MlflowClient, run_id: str) -> list[tuple[int, int, float]]:
    """Return the store's rows of `points`: step, milliseconds, value."""
    rows = client.get_metric_history(run_id, "memory/host/rss_mib")
    return sorted((row.step, row.timestamp, row.value) for row in rows)
