"""A run's folder that comes from elsewhere, delivered from a machine that holds credentials."""

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support import child
from support.journals import MIB, MadeRun, at, batch

from memlog.events import End, Run

pytestmark = pytest.mark.integration

KEY = "sekret" * 6 + "0123"
ENVIRONMENT = {
    "mlflow": {"MLFLOW_TRACKING_URI": "http://tracking.corp:5000", "MLFLOW_TRACKING_TOKEN": KEY},
    "wandb": {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "https://api.wandb.ai"},
}


class Listener:
    """Server that answers every request and remembers each request's sender and content."""

    def __init__(self) -> None:
        heard: list[tuple[str, str | None]] = []

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heard.append((self.path, self.headers.get("Authorization")))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_PUT = do_GET  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None:
                pass

        self.heard = heard
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def evil() -> Iterator[Listener]:
    listener = Listener()
    thread = Thread(target=listener.server.serve_forever, daemon=True)
    thread.start()
    yield listener
    listener.server.shutdown()
    listener.server.server_close()
    thread.join(10)


def memlog(
    backend: str, directory: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    process = child.start_memlog(
        *arguments,
        "--dir",
        "runs",
        directory=directory,
        HOME=str(directory),
        **{**ENVIRONMENT[backend], **environment},
    )
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.mark.parametrize("how", ["state", "binding"])
@pytest.mark.parametrize("backend", ["mlflow", "wandb"])
def test_its_address_gets_no_credentials(
    tmp_path: Path, evil: Listener, backend: str, how: str
) -> None:
    made = MadeRun(tmp_path / "runs").write(Run(at(0), None, None, (backend,), {}))
    made.write(*(batch(step, MIB) for step in range(3)), End(at(3), "finished"))
    run = made.closed()
    if how == "state":
        state = run.delivery / f"{backend}.json"
        state.write_text(json.dumps({"backend": backend, "address": evil.url}))
    else:
        segment = min(run.path.glob("trainer-*.jsonl"))
        address = f"{evil.url}/x/y/runs/{'a' * 32}" if backend == "wandb" else evil.url
        bound = json.dumps({backend: {"run_id": "a" * 32, "uri": address}})
        segment.write_text(segment.read_text().replace('"bindings":{}', f'"bindings":{bound}', 1))
    done = memlog(backend, tmp_path, "sync", run.id, "--timeout", "1")
    assert done.returncode == 1
    assert f"the run names {evil.url}" in done.stderr
    assert "--trust-address" in done.stderr
    assert KEY not in done.stdout + done.stderr
    if how == "binding":
        pulled = memlog(backend, tmp_path, "pull", run.id, "--backend", backend, "-o", "out")
        assert f"the run names {evil.url}" in pulled.stderr
    assert evil.heard == []


def test_without_credentials_it_goes_on_where_the_run_says(tmp_path: Path, evil: Listener) -> None:
    made = MadeRun(tmp_path / "runs").write(Run(at(0), None, None, ("mlflow",), {}))
    run = made.write(batch(0, MIB), End(at(3), "finished")).closed()
    (run.delivery / "mlflow.json").write_text(
        json.dumps({"backend": "mlflow", "address": evil.url})
    )
    memlog("mlflow", tmp_path, "sync", run.id, "--timeout", "1", MLFLOW_TRACKING_TOKEN="")
    assert evil.heard
    assert {authorization for _, authorization in evil.heard} == {None}
