"""Output of `memlog doctor`."""

import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.commands import memlog
from support.journals import finished_run

from memlog.cli import doctor
from memlog.cli.doctor import Check
from memlog.probes.nvml import NvidiaDevice, NvidiaDriver

pytestmark = pytest.mark.usefixtures("plain_environment", "no_trackers")


@pytest.fixture
def no_trackers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take away what the environment says of trackers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def checks(code: int) -> dict[str, Check]:
    result = memlog("doctor", "--json")
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert document["ok"] == (code == 0)
    return {each["name"]: Check(**each) for each in document["checks"]}


@contextmanager
def server(status: int, seen: list[Mapping[str, str]] | None = None) -> Iterator[str]:
    """Serve one answer to every request on loopback, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if seen is not None:
                seen.append(dict(self.headers))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_a_healthy_installation_has_one_line_a_check(tmp_path: Path) -> None:
    finished_run(tmp_path)
    result = memlog("doctor")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    names = ("memlog", "runs folder", "torch", "CUDA", "mlflow", "wandb", "trainers", "memory")
    for name in names:
        assert sum(line[2:].lstrip().startswith(name) for line in lines) == 1, name
    assert f"{tmp_path}: 1 run, " in result.stdout
    assert lines[-1] == "Nothing needs a remedy."


def test_it_imports_neither_torch_nor_trackers() -> None:
    program = """
import sys
from click.testing import CliRunner
from memlog.cli.main import cli
CliRunner().invoke(cli, ["doctor"], catch_exceptions=False)
print([name for name in ("torch", "mlflow", "wandb", "trackio", "tensorboard") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split() == [b"[]"]


@pytest.mark.parametrize(
    ("status", "problem"),
    [(200, None), (401, None), (404, None), (503, "answers 503"), (429, "answers 429")],
)
def test_a_tracker_answers_or_needs_a_remedy(
    monkeypatch: pytest.MonkeyPatch, status: int, problem: str | None
) -> None:
    with server(status) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        found = checks(0 if problem is None else 1)["mlflow"]
    if problem is None:
        assert found.text.endswith(f", {address} answers")
        assert found.remedy is None
    else:
        assert found.text.endswith(problem)
        assert found.remedy is not None
        assert found.remedy.startswith("correct MLFLOW_TRACKING_URI, or start it; ")


def test_no_credentials_are_sent_or_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, str]] = []
    with server(200, seen) as address:
        secret = address.replace("http://", "http://ann:s3cret@")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", secret)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
        result = memlog("doctor")
    assert result.exit_code == 0
    assert f"{address} answers" in result.stdout
    assert "s3cret" not in result.output
    assert len(seen) == 1
    assert not any("Authorization" in name or "t0ken" in value for name, value in seen[0].items())


def test_nothing_listens_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address in (f"http://127.0.0.1:{port}", f"postgresql://ann:s3cret@127.0.0.1:{port}/runs"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        text = checks(1)["mlflow"].text
        assert text.endswith("does not answer (connection refused)")
        assert "s3cret" not in text


def test_an_exporters_endpoint_takes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_BACKEND", "otlp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    refused = f"the OTLP endpoint at {address} does not answer (connection refused)"
    assert checks(1)["otlp"].text.endswith(refused)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert "set it to http/protobuf or grpc" in checks(1)["otlp"].text


def test_a_server_that_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert checks(1)["mlflow"].text.endswith("does not answer (timeout)")


def test_a_search_for_a_host_can_take_no_longer_than_all_trackers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE", 0.1)
    told = threading.Event()
    monkeypatch.setattr(doctor, "_tracker", lambda *_, **__: told.wait(60))
    found = checks(1)
    told.set()
    assert found["wandb"].text == "no answer within 0.1 s"


def test_a_tracker_with_another_certificate_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise doctor.urllib.error.URLError(ssl.SSLCertVerificationError("verify failed"))

    monkeypatch.setattr(doctor.urllib.request, "urlopen", refuse)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracker.example")
    assert checks(0)["mlflow"].text.endswith("https://tracker.example answers")


def test_a_tracker_that_is_not_set_up_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(503) as address:
        monkeypatch.setattr("memlog_wandb.environment.DEFAULT_SERVER", address)
        found = checks(0)["wandb"]
        assert found.state == "note"
        assert found.text.endswith(f"not set up: {address} is not asked")
        monkeypatch.setenv("MEMLOG_BACKEND", "wandb")
        assert checks(1)["wandb"].text.endswith("answers 503")
        monkeypatch.setenv("WANDB_MODE", "offline")
        assert "WANDB_MODE=offline" in checks(0)["wandb"].text


def test_a_store_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    assert checks(0)["mlflow"].text.endswith(f", in {tmp_path}/runs.db")
    assert not (tmp_path / "runs.db").exists()


def test_settings_that_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_ENABLED", "0")
    monkeypatch.setenv("MEMLOG_BACKEND", "wandp")
    found = checks(1)
    assert found["settings"].text == "MEMLOG_ENABLED=0 switches memlog off"
    assert "did you mean 'wandb'?" in found["wandp"].text
    assert memlog("doctor").stdout.splitlines()[-1].endswith("checks need a remedy.")


def test_a_folder_that_cannot_hold_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path / "file" / "runs"))
    found = checks(1)["runs folder"]
    assert found.text == f"{tmp_path}/file/runs can't be written"
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "_SCARCE", 2**62)
    assert "disk with more space" in (checks(1)["runs folder"].remedy or "")


def test_an_old_or_missing_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "site" / "mlflow-2.9.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: mlflow\nVersion: 2.9.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = checks(1)["mlflow"]
    assert found.text == "2.9.0 is older than memlog needs"
    assert (found.remedy or "").startswith("pip install 'mlflow>=3")
    monkeypatch.setattr("memlog.sink.search.is_installed", lambda _: False)
    assert checks(0)["mlflow"].state == "note"
    monkeypatch.setenv("MEMLOG_BACKEND", "mlflow")
    found = checks(1)["mlflow"]
    assert found.text == "not installed"
    assert "pip install 'mlflow>=" in (found.remedy or "")


GIB = 1024**3
H100S = "2 of NVIDIA H100 80.0 GiB"
DRIVER = NvidiaDriver("580.82", (13, 0), [NvidiaDevice("NVIDIA H100", 80 * GIB)] * 2)


@pytest.mark.parametrize(
    ("driver", "build", "state", "text"),
    [
        (None, (12, 8), "note", "no NVIDIA driver"),
        (
            DRIVER,
            (12, 8),
            "ok",
            "2 of NVIDIA H100 80.0 GiB, driver 580.82 for CUDA 13.0; torch is for CUDA 12.8",
        ),
        (DRIVER, "a build for CPUs", "problem", "torch is a build for CPUs"),
        (DRIVER._replace(cuda=(12, 4)), (13, 0), "problem", "for CUDA 12.4; torch needs CUDA 13.0"),
        (DRIVER, None, "note", "driver 580.82 for CUDA 13.0"),
        (DRIVER._replace(devices=[]), (13, 0), "note", "no device, driver 580.82 for CUDA 13.0"),
    ],
)
def test_cuda(
    monkeypatch: pytest.MonkeyPatch,
    driver: NvidiaDriver | None,
    build: tuple[int, int] | str | None,
    state: str,
    text: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = doctor._cuda(driver, build)
    assert found.state == state
    assert found.text.endswith(text)
    assert (found.remedy is not None) == (state == "problem")


def test_hidden_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=" in doctor._cuda(DRIVER, (13, 0)).text


def test_a_control_groups_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "machine_memory", lambda: 64 * GIB)
    monkeypatch.setattr(doctor, "available_memory", lambda: 40 * GIB)
    limits = {16 * GIB: "16.0 GiB (the control group's limit)", None: "64.0 GiB (the machine's; no"}
    for limit, text in limits.items():
        reading = doctor.read_cgroup(1)._replace(used=GIB, limit=limit)
        monkeypatch.setattr(doctor, "read_cgroup", lambda _, reading=reading: reading)
        assert checks(0)["memory"].text.startswith(text)
