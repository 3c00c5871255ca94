"""The OTLP sink keeps the contract of all sinks. Receivers on loopback decode the protocol's own messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, get_args

import pytest
from msgspec.structs import replace
from support.otlp_receiver import GrpcReceiver, HttpReceiver, Store

from memlog.events import Status
from memlog.sink import Connection, Sink, Target, TrackerRun
from memlog.testing import Row, Shown, SinkContract, Time
from memlog_otlp import backend
from memlog_otlp.series import MIB, STEP

pytestmark = pytest.mark.integration

NAMES = {
    "process.memory.usage": ("memory/host/rss_mib", MIB, "step"),
    "memlog.host.memory.rss_peak": ("memory/host/rss_peak_mib", MIB, "step"),
    "memlog.step.loss": ("memory/step/loss", 1, "step"),
    "memlog.step.alert": ("memory/step/alert", 1, "step"),
    **{
        f"memlog.{short}.{name}": (f"memory/{short}/{own}", factor, axis)
        for short, axis in (("eval", "evaluation"), ("epoch", "epoch"))
        for name, own, factor in (
            ("host.memory.rss", "host/rss_mib", MIB),
            ("host.memory.rss_peak", "host/rss_peak_mib", MIB),
            ("loss", "loss", 1),
            ("iteration", "iteration", 1),
        )
    },
}
"""Series of the contract's points: memlog's name, the unit, and the axis."""


class OtlpContract(SinkContract):
    cannot_show: ClassVar[Mapping[Shown, str]] = {
        "files": "metrics carry no files",
        "order": "a store orders values by their times",
    }

    def receiver(self) -> HttpReceiver | GrpcReceiver:
        raise NotImplementedError

    protocol: str

    @pytest.fixture(autouse=True)
    def _receiver(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.store = Store()
        self.server = self.receiver()
        self.server.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", self.protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", self.server.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        yield
        self.server.stop()

    def open_sink(self, target: Target) -> Sink:
        return backend.open_sink(replace(target, connection=Connection()))

    def user_run(self) -> TrackerRun:
        return TrackerRun("users")

    @contextmanager
    def down(self) -> Iterator[None]:
        self.server.stop()
        yield
        self.server.start()

    def points(self, run_id: str) -> list[tuple[str, int, float, int]]:
        held = self.store.of_run(run_id)
        indices = {
            (axis, time): int(value)
            for name, _, time, value in held
            for axis, series in STEP.items()
            if name == series
        }
        found = []
        for name, attributes, time, value in held:
            if name in NAMES:
                own, unit, axis = NAMES[name]
                found.append((own, indices[axis, time], value / unit, time))
            elif name in ("memlog.odd", "memlog.other"):
                found.append((attributes.get("memlog.name", name), 0, value, time))
        return found

    def rows(self, run_id: str) -> Sequence[Row]:
        return [(name, index, value) for name, index, value, _ in self.points(run_id)]

    def times(self, run_id: str) -> Sequence[Time]:
        return [(name, index, time // 1_000_000) for name, index, _, time in self.points(run_id)]

    def attributes(self, run_id: str, name: str) -> list[dict[str, str]]:
        return [each for found, each, _, _ in self.store.of_run(run_id) if found == name]

    def parameters(self, run_id: str) -> Mapping[str, str]:
        return {
            name.removeprefix("memlog."): text
            for each in self.attributes(run_id, "memlog.run.info")
            for name, text in each.items()
        }

    def alerts(self, run_id: str) -> Sequence[str]:
        return [each["memlog.alert.title"] for each in self.attributes(run_id, "memlog.alert")]

    def end(self, run_id: str) -> tuple[Status, int] | None:
        held = self.store.of_run(run_id)
        ends = [
            (time, each["memlog.status"])
            for name, each, time, _ in held
            if name == "memlog.run.end"
        ]
        if not ends:
            return None
        time, found = max(ends)
        return next(status for status in get_args(Status) if status == found), time // 1_000_000

    def status(self, run_id: str) -> Status | None:
        end = self.end(run_id)
        return end and end[0]

    def ended_ms(self, run_id: str) -> int | None:
        end = self.end(run_id)
        return end and end[1]


class TestOverHttp(OtlpContract):
    protocol = "http/protobuf"

    def receiver(self) -> HttpReceiver:
        return HttpReceiver(self.store)


class TestOverGrpc(OtlpContract):
    protocol = "grpc"

    def receiver(self) -> GrpcReceiver:
        return GrpcReceiver(self.store)
