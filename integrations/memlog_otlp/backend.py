"""Backend for OpenTelemetry's protocol. The training process imports this module."""

from __future__ import annotations

from memlog._internal.processes import described
from memlog.errors import MemlogError
from memlog.sink import ClientBackend, ClientVariables, Connection, Target

RANK = "MEMLOG_RANK"
"""Variable that tells memlog's helper process the training process's rank."""


class MetricsBackend(ClientBackend):
    """Base class of backends that OpenTelemetry's environment variables configure, and that have no runs."""

    joins = False

    def connection(self) -> Connection:
        """Return the variables that are set in this process, and the process's rank."""
        rank = {RANK: described().get("rank", "0")}
        return Connection(environment={**self.variables.gathered(), **rank})


class OtlpBackend(MetricsBackend):
    """Backend that exports metrics to the endpoint that OpenTelemetry's environment variables name."""

    name = extra = "otlp"
    requires = "opentelemetry.exporter.otlp.proto.http"
    sink = "memlog_otlp.sink:OtlpSink"
    variables = ClientVariables(("OTEL_",))

    def problem(self) -> str | None:
        """Return why nothing can be exported; ``None`` if the endpoint takes connections."""
        try:
            self.open_sink(Target("doctor", None, connection=self.connection())).probe()
        except MemlogError as error:
            return str(error)
        return None
