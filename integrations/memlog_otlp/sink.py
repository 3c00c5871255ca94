"""Sink that exports a run's metrics over OTLP. The sink runs in a process of memlog's own."""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from memlog._internal.connections import does_not_answer, in_short, reason_of
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status, now_us
from memlog.sink import Point, Resolution, Target, TrackerRun
from memlog_otlp import series
from memlog_otlp.series import Series

_PROBE = 2.0
_PROTOCOLS = {"grpc": ("grpc", 4317), "http/protobuf": ("http", 4318)}
_LOGGER = "opentelemetry.exporter"
_ANSWERED = re.compile(r"code: (?:StatusCode\.)?(?P<code>\w+)")
_LARGEST = 2**53
"""Largest index that a value of a series, which is a 64-bit float, can be without rounding."""
_REFUSES_CONTENT = frozenset({"400", "413", "422", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"})
_REFUSES_CREDENTIALS = frozenset({"401", "403", "UNAUTHENTICATED", "PERMISSION_DENIED"})


class OtlpSink:
    """A `memlog.sink.Sink` for OpenTelemetry's metrics. Its methods raise the errors that `Sink` names.

    Each value has the time of its event. So a store keeps a value that is sent twice once: it has one value
    per series and time.

    Args:
        target: The run. Its id, and the rank of the process, are attributes of each value.

    Attributes:
        dropped: Number of points left out so far, by reason. The only reason is ``index``: a series of steps
            can't have an index above 2^53.
    """

    durable = True
    resolution: Resolution = "bucketed"
    max_points = 1000
    has_files = False

    def __init__(self, target: Target) -> None:
        self._diagnostics = Diagnostics()
        self.dropped: Mapping[str, int] = self._diagnostics.dropped
        self._target = target
        self._common = series.common_of(target)
        self._run = self._common[series.RUN]
        protocol = _variable("PROTOCOL") or "http/protobuf"
        if protocol not in _PROTOCOLS:
            raise ConfigurationError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}: set it to http/protobuf or grpc"
            )
        kind, port = _PROTOCOLS[protocol]
        self._endpoint = _variable("ENDPOINT") or f"http://localhost:{port}"
        module = importlib.import_module(
            f"opentelemetry.exporter.otlp.proto.{kind}.metric_exporter"
        )
        self._exporter: MetricExporter = module.OTLPMetricExporter()
        # Without its filter, which hides the reason of a failure that occurs again within 20 s.
        logging.getLogger(f"{_LOGGER}.otlp.proto.grpc.exporter").filters.clear()
        named = {SERVICE_NAME: "memlog", SERVICE_INSTANCE_ID: self._run}
        self._resource = Resource(named).merge(OTELResourceDetector().detect())

    def probe(self) -> None:
        """Check that the endpoint takes connections. Behind a proxy, nothing is checked."""
        parts = urlsplit(self._endpoint if "://" in self._endpoint else f"//{self._endpoint}")
        if parts.hostname is None or parts.scheme == "unix" or _is_behind_proxy(parts.scheme):
            return
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 4317)
        try:
            socket.create_connection((parts.hostname, port), _PROBE).close()
        except OSError as error:
            raise self._unavailable(str(error)) from None

    def open(self) -> TrackerRun:
        """Return the run. OpenTelemetry has no runs, so nothing is opened."""
        self.probe()
        return TrackerRun(self._run, name=self._target.name)

    def log_points(self, points: Sequence[Point]) -> None:
        """Export points, and the newest index of each axis at its time."""
        # Some stores, such as Prometheus, refuse a request with a value older than the one before it.
        kept = sorted(filter(self._is_storable, points), key=lambda point: point.time_us)
        indices = {(point.axis, point.index, point.time_us): point for point in kept}
        self._export(
            [
                *((series.series_of(point), point.time_us) for point in kept),
                *((series.index_of(point), point.time_us) for point in indices.values()),
            ]
        )

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Export the parameters as attributes of ``memlog.run.info``."""
        self._export([(series.info_of(parameters), self._begun_us)])

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Export the new alerts as ``memlog.alert``."""
        self._export([(series.alert_of(alert), alert.time_us) for alert in alerts[first_new:]])

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Do nothing: metrics carry no files."""

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Export the end of memlog's own run as ``memlog.run.end``."""
        if self._target.joined is None and status is not None:
            self._export([(series.end_of(status), ended_us or now_us())])

    @property
    def _begun_us(self) -> int:
        return self._target.begun_us or 0

    def _export(self, values: Iterable[tuple[Series, int]]) -> None:
        """Export values, each with its Unix time in microseconds."""
        metrics: dict[str, tuple[Series, list[NumberDataPoint]]] = {}
        for each, time_us in values:
            at = NumberDataPoint(
                {**self._common, **each.attributes},
                self._begun_us * 1000,
                time_us * 1000,
                each.value,
            )
            metrics.setdefault(each.name, (each, []))[1].append(at)
        if not metrics:
            return
        self.probe()
        scope = ScopeMetrics(
            InstrumentationScope("memlog"), [_metric(*each) for each in metrics.values()], ""
        )
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        with _messages() as messages:
            result = self._exporter.export(data)
        if result is not MetricExportResult.SUCCESS:
            raise self._error(messages[-1] if messages else "the export failed")

    def _is_storable(self, point: Point) -> bool:
        if point.index <= _LARGEST:
            return True
        self._diagnostics.drop("index", f"{point.name} has the index {point.index}: not exported")
        return False

    def _error(self, text: str) -> Exception:
        answered = _ANSWERED.search(text)
        code = answered["code"] if answered else ""
        if code in _REFUSES_CONTENT:
            return TrackerRejectedError(f"the OTLP endpoint refuses it: {in_short(text)}")
        if code in _REFUSES_CREDENTIALS:
            return TrackerUnavailableError(
                f"the OTLP endpoint refuses the credentials ({code}): set OTEL_EXPORTER_OTLP_HEADERS"
            )
        return self._unavailable(text)

    def _unavailable(self, text: str) -> TrackerUnavailableError:
        reason = reason_of(text) or in_short(text)
        return TrackerUnavailableError(
            does_not_answer("the OTLP endpoint", self._endpoint, text, reason)
        )


def _variable(name: str) -> str | None:
    """Return one of OpenTelemetry's variables. That of metrics comes before that of all signals."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}")
    return own or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")


def _is_behind_proxy(scheme: str) -> bool:
    return scheme in urllib.request.getproxies()


def _metric(first: Series, points: list[NumberDataPoint]) -> Metric:
    data: Gauge | Sum = Gauge(points)
    if first.is_level:
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=False)
    return Metric(first.name, "", first.unit, data)


@contextmanager
def _messages() -> Iterator[list[str]]:
    """Collect the messages of OpenTelemetry's exporters, which tell the reason of a failure only there."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger(_LOGGER), Collector()
    propagates, logger.propagate = logger.propagate, False  # memlog logs an outage once
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
