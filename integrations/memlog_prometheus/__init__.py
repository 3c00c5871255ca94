"""memlog's integration with Prometheus: an endpoint with a run's newest values.

Importing this package does not import prometheus_client. memlog serves the endpoint from its helper process,
with the sink that `backend.open_sink` returns.
"""

from __future__ import annotations

from memlog.sink import ClientVariables
from memlog_otlp.backend import MetricsBackend


class PrometheusBackend(MetricsBackend):
    """Backend that serves metrics where OpenTelemetry's variables for Prometheus say."""

    name = extra = "prometheus"
    requires = "prometheus_client"
    sink = "memlog_prometheus.sink:PrometheusSink"
    variables = ClientVariables(("OTEL_EXPORTER_PROMETHEUS_",))


backend = PrometheusBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
