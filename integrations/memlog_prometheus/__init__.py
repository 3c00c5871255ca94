"""memlog's integration with Prometheus: an endpoint with a run's newest values.

Importing this package does not import prometheus_client. memlog serves the endpoint from its helper process,
with the sink that `backend.open_sink` returns.
"""

from __future__ import annotations

from memlog._internal.processes import described
from memlog.sink import ClientBackend, ClientVariables, Connection
from memlog_otlp.backend import RANK


class PrometheusBackend(ClientBackend):
    """Backend that serves metrics where OpenTelemetry's variables for Prometheus say."""

    name = extra = "prometheus"
    joins = False
    requires = "prometheus_client"
    sink = "memlog_prometheus.sink:PrometheusSink"
    variables = ClientVariables(("OTEL_EXPORTER_PROMETHEUS_",))

    def connection(self) -> Connection:
        """Return the variables that are set in this process, and the process's rank."""
        rank = {RANK: described().get("rank", "0")}
        return Connection(environment={**self.variables.gathered(), **rank})


backend = PrometheusBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
