"""Exports to OTLP receivers: a whole program, names and attributes, refusals and wrong settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from support import child
from support.otlp_receiver import GrpcReceiver, HttpReceiver, Store

from memlog.errors import ConfigurationError, TrackerRejectedError, TrackerUnavailableError
from memlog.sink import Connection, Point, Target
from memlog_otlp import backend
from memlog_otlp.series import series_of

pytestmark = pytest.mark.integration

PROGRAM = """
    import memlog

    session = memlog.init("otlp", dir="runs", alerts=["host.rss > 1 MiB"], finish_timeout=60)
    for step in range(20):
        session.step()
    memlog.finish()
"""
POINT = Point("memory/host/rss_mib", 1.0, "step", 0, 1_795_000_000_000_000)


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    server = HttpReceiver(Store())
    server.start()
    yield server
    server.stop()


def environment(server: HttpReceiver | GrpcReceiver, protocol: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": server.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=lab",
        "OTEL_SERVICE_NAME": "my training",
    }


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_program_exports_its_memory(protocol: str, tmp_path: Path) -> None:
    store = Store()
    server = HttpReceiver(store) if protocol != "grpc" else GrpcReceiver(store)
    server.start()
    try:
        ranked = {"RANK": "0", "WORLD_SIZE": "1"}
        child.run(PROGRAM, tmp_path, **environment(server, protocol), **ranked)
    finally:
        server.stop()
    usage = store.metrics["process.memory.usage"]
    assert (usage.unit, usage.WhichOneof("data")) == ("By", "sum")
    assert not usage.sum.is_monotonic
    assert store.metrics["memlog.host.memory.rss_peak"].WhichOneof("data") == "gauge"
    (attributes,) = [dict(found) for name, found in store.series if name == "process.memory.usage"]
    assert attributes["memlog.rank"] == "0"
    held = store.of_run(attributes["memlog.run"])
    levels = [value for name, _, _, value in held if name == "process.memory.usage"]
    assert len(levels) == 20
    assert min(levels) > 2**20
    assert [value for name, _, _, value in held if name == "memlog.step"][-1] == 19
    ends = [found["memlog.status"] for name, found, _, _ in held if name == "memlog.run.end"]
    assert ends == ["finished"]
    assert any(name == "memlog.alert" for name, *_ in held)
    for resource in store.resources:
        assert resource["service.name"] == "my training"
        assert resource["deployment.environment"] == "lab"
        assert resource["service.instance.id"] == attributes["memlog.run"]
    sent = [{name.lower(): text for name, text in each.items()} for each in store.headers]
    assert {each["api-key"] for each in sent} == {"secret"}
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"api-key" not in file.read_bytes()


@pytest.mark.parametrize(
    ("name", "series", "attributes"),
    [
        ("memory/host/rss_mib", "process.memory.usage", {}),
        ("memory/host/available_mib", "system.memory.linux.available", {}),
        ("memory/host/cgroup_mib", "container.memory.usage", {}),
        ("memory/cuda0/device_used_mib", "hw.gpu.memory.usage", {"hw.id": "cuda0"}),
        ("memory/cuda1/allocated_mib", "memlog.gpu.memory.allocated", {"hw.id": "cuda1"}),
        ("memory/mps/allocated_mib", "memlog.gpu.memory.allocated", {"hw.id": "mps"}),
        ("memory/cuda0/fragmentation", "memlog.gpu.fragmentation", {"hw.id": "cuda0"}),
        ("memory/epoch/cuda0/peak_mib", "memlog.epoch.gpu.memory.peak", {"hw.id": "cuda0"}),
        (
            "memory/phase/rollout/cuda0/peak_mib",
            "memlog.phase.gpu.memory.peak",
            {"memlog.label": "rollout", "hw.id": "cuda0"},
        ),
        (
            "memory/layers/h.0.mlp.at_peak_mib",
            "memlog.layer.memory.at_peak",
            {"memlog.layer": "h.0.mlp"},
        ),
        ("memory/ranks/host/rss_max_mib", "memlog.ranks.host.memory.rss_max", {}),
        ("memlog/dropped", "memlog.dropped", {}),
        ("ü\ud800", "memlog.other", {"memlog.name": "ü\\ud800"}),
    ],
)
def test_names_follow_the_conventions(name: str, series: str, attributes: dict[str, str]) -> None:
    found = series_of(Point(name, 2.0, "step", 0, 0))
    assert (found.name, found.attributes) == (series, attributes)
    is_size = name.endswith("_mib")
    assert found.value == (2 * 2**20 if is_size else 2.0)
    assert found.unit == ("By" if is_size else "1" if name.endswith("fragmentation") else "")


@pytest.mark.parametrize(
    ("answer", "error"),
    [(400, TrackerRejectedError), (401, TrackerUnavailableError), (404, TrackerUnavailableError)],
)
def test_a_refusal_is_told(
    answer: int,
    error: type[Exception],
    receiver: HttpReceiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver.store.answer = answer
    for name, text in environment(receiver, "http/protobuf").items():
        monkeypatch.setenv(name, text)
    sink = backend.open_sink(Target("run", None, connection=Connection()))
    with pytest.raises(error, match="OTLP endpoint"):
        sink.log_points([POINT])


def test_a_refusal_over_grpc_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = GrpcReceiver(Store())
    server.start()
    server.store.answer = 400
    for name, text in environment(server, "grpc").items():
        monkeypatch.setenv(name, text)
    sink = backend.open_sink(Target("run", None, connection=Connection()))
    for _ in range(3):  # the exporter logs the same message once in 20 s
        with pytest.raises(TrackerRejectedError, match="INVALID_ARGUMENT"):
            sink.log_points([POINT])
    server.stop()


def test_values_of_a_request_do_not_go_back_in_time(
    receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environment(receiver, "http/protobuf").items():
        monkeypatch.setenv(name, text)
    sink = backend.open_sink(Target("run", None, connection=Connection()))
    later = [POINT.time_us + second * 1_000_000 for second in range(6)]
    points = [
        structs.replace(POINT, index=step, time_us=later[step]) for step in (2, 0, 1, 5, 4, 3)
    ]
    sink.log_points(points)
    steps = [value for name, _, _, value in receiver.store.of_run("run") if name == "memlog.step"]
    assert steps == [0, 1, 2, 3, 4, 5]


def test_an_unknown_protocol_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigurationError, match="set it to http/protobuf or grpc"):
        backend.open_sink(Target("run", None, connection=Connection()))
