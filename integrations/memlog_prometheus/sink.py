"""Sink that serves a run's newest values to Prometheus. The sink runs in a process of memlog's own.

The names are those of `memlog_otlp.series`, converted by OpenTelemetry's rules: dots become underscores, and
the unit is a suffix.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memlog.errors import ConfigurationError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status, now_us
from memlog.sink import Point, Resolution, Target, TrackerRun
from memlog_otlp import series
from memlog_otlp.series import Series

HOST, PORT = "OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT"
_DEFAULT_HOST, _DEFAULT_PORT = "localhost", "9464"
_LAST_PORT = 65_535
_SUFFIXES = {"By": "_bytes", "1": "_ratio", "": ""}
_FOREIGN = re.compile(r"[^a-zA-Z0-9_]+")


class PrometheusSink:
    """A `memlog.sink.Sink` for Prometheus. Its methods raise the errors that `Sink` names.

    Prometheus fetches values, so it has those of the moments at which it fetches. The endpoint ends with
    memlog's helper process.

    Args:
        target: The run. Its id, and the rank of the process, are labels of each value.

    Attributes:
        dropped: Points left out so far, by reason; always empty.
    """

    durable = True
    resolution: Resolution = "full"
    max_points = 1000
    has_files = False

    def __init__(self, target: Target) -> None:
        self.dropped: Mapping[str, int] = {}
        self._target = target
        self._common = series.common_of(target)
        self._run = self._common[series.RUN]

    def probe(self) -> None:
        """Begin to serve the endpoint, if this process does not serve it yet."""
        Endpoint.serve()

    def open(self) -> TrackerRun:
        """Return the run. Prometheus has no runs, so nothing is opened."""
        return TrackerRun(self._run, name=self._target.name, link=f"{Endpoint.serve().url}/metrics")

    def log_points(self, points: Sequence[Point]) -> None:
        """Serve the points, and the index of each axis, unless newer ones are served."""
        self._set((series.series_of(point), point.time_us) for point in points)
        self._set((series.index_of(point), point.time_us) for point in points)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Serve the parameters as labels of ``memlog_run_info``."""
        self._set([(series.info_of(parameters), 0)])

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Serve the new alerts as ``memlog_alert``. Its value is the alert's Unix time in seconds.

        Titles are left out: each would be a series of its own.
        """
        for alert in alerts[first_new:]:
            found = series.alert_of(msgspec.structs.replace(alert, title=""))
            self._set([(found._replace(value=alert.time_us / 1e6), alert.time_us)])

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Do nothing: metrics carry no files."""

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Serve the end of memlog's own run as ``memlog_run_end``. The endpoint goes on."""
        if self._target.joined is None and status is not None:
            self._set([(series.end_of(status), ended_us or now_us())])

    def _set(self, values: Iterable[tuple[Series, int]]) -> None:
        Endpoint.serve().set(values, self._common)


class Endpoint(Collector):
    """Endpoint of this process, with the newest values of all its runs."""

    _served: ClassVar[Endpoint | None] = None

    def __init__(self, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, frozenset[tuple[str, str]]], tuple[int, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise TrackerUnavailableError(
                f"{host}:{port} can't be served to Prometheus ({error.strerror or error}): set {HOST} and "
                f"{PORT} to a free address of this machine"
            ) from error
        self.url = f"http://{host}:{self._server.server_port}"

    @classmethod
    def serve(cls) -> Endpoint:
        """Return this process's endpoint, which begins with the first call.

        Raises:
            ConfigurationError: The port is no number of a port.
            TrackerUnavailableError: The address is in use, or not this machine's.
        """
        if cls._served is None:
            port = os.environ.get(PORT) or _DEFAULT_PORT
            if not (port.isascii() and port.isdecimal() and int(port) <= _LAST_PORT):
                raise ConfigurationError(
                    f"{PORT}={port!r}: set it to a port, such as {_DEFAULT_PORT}"
                )
            cls._served = cls(os.environ.get(HOST) or _DEFAULT_HOST, int(port))
        return cls._served

    @classmethod
    def stop(cls) -> None:
        """Stop serving. The next call of `serve` begins anew, without values."""
        served, cls._served = cls._served, None
        if served is not None:
            served.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def set(self, values: Iterable[tuple[Series, int]], common: Mapping[str, str]) -> None:
        """Serve values, each with its Unix time in microseconds, unless newer ones are served."""
        with self._lock:
            for each, time_us in values:
                labels = {**common, **each.attributes}
                key = _name(each), frozenset((_label(name), text) for name, text in labels.items())
                if time_us >= self._newest.get(key, (0, 0.0))[0]:
                    self._newest[key] = time_us, each.value

    def collect(self) -> Iterator[Any]:
        """Yield the newest values. prometheus_client calls this for each fetch."""
        with self._lock:
            held = list(self._newest.items())
        families: dict[str, Metric] = {}
        for (name, labels), (_, value) in held:
            family = families.setdefault(name, Metric(name, name.replace("_", " "), "gauge"))
            family.add_sample(name, dict(labels), value)
        yield from families.values()


def _name(each: Series) -> str:
    return f"{_FOREIGN.sub('_', each.name)}{_SUFFIXES[each.unit]}"


def _label(name: str) -> str:
    return _FOREIGN.sub("_", name)
