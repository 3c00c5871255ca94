"""The endpoint for Prometheus: read by prometheus_client's parser, and by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import child
from support.mlflow_server import free_port
from support.servers import ServerProcess, answers

from memlog.errors import ConfigurationError, TrackerUnavailableError
from memlog.events import Alert
from memlog.sink import Connection, Point, Target
from memlog_prometheus import backend
from memlog_prometheus.sink import Endpoint

pytestmark = pytest.mark.integration

DASHBOARD = Path(__file__).parents[3] / "integrations" / "grafana" / "memlog.json"
PROGRAM = """
    import select
    import sys

    import memlog

    session = memlog.init("prometheus", dir="runs", alerts=["host.rss > 1 MiB"])
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        session.step()
    memlog.finish()
"""


def fetched(url: str) -> dict[str, list[Any]]:
    """Return the samples of an endpoint by the name of their metric."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - on loopback
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: family.samples for family in families}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    yield port
    Endpoint.stop()


def sink_of(run: str = "run") -> Any:
    return backend.open_sink(Target(run, None, connection=Connection()))


def point(name: str, value: float, step: int) -> Point:
    return Point(name, value, "step", step, 1_795_000_000_000_000 + step * 1500)


def test_the_newest_values_are_served(port: int) -> None:
    for run in ("a", "b"):
        sink = sink_of(run)
        assert sink.open().link == f"http://localhost:{port}/metrics"
        sink.log_points(
            [point("memory/host/rss_mib", 2.0, 5), point("memory/host/rss_mib", 1.0, 4)]
        )
        sink.log_points([point("memory/cuda0/fragmentation", 0.5, 5)])
        sink.log_parameters({"host": 'a"\nb', "git_commit": "c0ffee"})
        sink.log_alerts([Alert(1_000_000, 5, "warning", "host.rss > 1 MiB", "a title", "text")], 0)
        sink.close("failed", 1_795_000_001_000_000)
    held = fetched(f"http://localhost:{port}/metrics")
    assert [sample.value for sample in held["process_memory_usage_bytes"]] == [2 * 2**20] * 2
    runs = [sample.labels for sample in held["process_memory_usage_bytes"]]
    assert runs == [{"memlog_run": run, "memlog_rank": "0"} for run in ("a", "b")]
    (fragmentation, _) = held["memlog_gpu_fragmentation_ratio"]
    assert (fragmentation.labels["hw_id"], fragmentation.value) == ("cuda0", 0.5)
    assert held["memlog_run_info"][0].labels["memlog_host"] == 'a"\nb'
    assert held["memlog_step"][0].value == 5
    assert held["memlog_run_end"][0].labels["memlog_status"] == "failed"
    (alert, _) = held["memlog_alert"]
    assert (alert.value, alert.labels["memlog_alert_rule"]) == (1.0, "host.rss > 1 MiB")


def test_an_address_in_use_is_told(port: int) -> None:
    with (
        socket.create_server(("localhost", port)),
        pytest.raises(TrackerUnavailableError, match="OTEL_EXPORTER_PROMETHEUS_PORT to a free"),
    ):
        sink_of().probe()
    sink_of().probe()


@pytest.mark.parametrize("wrong", ["no", "-1", "70000"])
def test_a_wrong_port_is_told(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", wrong)
    with pytest.raises(ConfigurationError, match="set it to a port"):
        sink_of().probe()


class Prometheus(ServerProcess):
    """A real Prometheus that fetches one endpoint each half second."""

    def __init__(self, folder: Path, target: int) -> None:
        self.url = f"http://localhost:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
            f"scrape_configs: [{{job_name: memlog, static_configs: [{{targets: ['localhost:{target}']}}]}}]\n"
        )
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self.launch(command, lambda: answers(f"{self.url}/-/ready"), folder / "prometheus.log")

    def ask(self, query: str) -> list[dict[str, Any]]:
        text = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{text}", timeout=10) as answer:  # noqa: S310 - on loopback
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    return [query.replace("$run", ".*").replace("$__range", "1h") for query in queries]


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is missing: apt-get install prometheus"
)
def test_a_real_prometheus_has_the_runs_memory(port: int, tmp_path: Path) -> None:
    program = child.start(PROGRAM, tmp_path, stdin=-1, OTEL_EXPORTER_PROMETHEUS_PORT=str(port))
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    server = Prometheus(tmp_path, port)
    try:
        deadline = time.monotonic() + 60
        while not (found := server.ask("process_memory_usage_bytes")):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert float(found[0]["value"][1]) > 2**20
        assert {"memlog_run", "memlog_rank"} <= set(found[0]["metric"])
        for _ in range(100):
            shown = {
                query: server.ask(query) for query in expressions()
            }  # a wrong query is refused
            if all(shown[query] for query in shown if not re.search("gpu|ranks|deriv", query)):
                break
            time.sleep(0.2)
        else:
            raise AssertionError([query for query, rows in shown.items() if not rows])
        [trainings] = [query for query in shown if "memlog_run_info" in query]
        assert len(shown[trainings]) == 1
    finally:
        server.stop(signal.SIGTERM)
        _, errors = program.communicate("x", timeout=60)
    assert program.returncode == 0, errors
