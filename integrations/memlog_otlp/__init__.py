"""memlog's integration with OpenTelemetry: metrics over OTLP, by HTTP or gRPC.

Importing this package does not import opentelemetry. memlog exports from its own processes, with the sink
that `backend.open_sink` returns.
"""

from memlog_otlp.backend import OtlpBackend

backend = OtlpBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
