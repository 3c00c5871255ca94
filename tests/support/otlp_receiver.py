"""Receivers of OTLP on loopback, which decode the protocol's own messages and keep one value per time."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeAlias

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as service_grpc

Attributes: TypeAlias = "frozenset[tuple[str, str]]"


class Store:
    """Series that arrived. A time that arrives twice replaces the earlier value, as in stores of series."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, Attributes], dict[int, float]] = defaultdict(dict)
        self.metrics: dict[str, Any] = {}
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.answer = 200

    def take(self, request: service.ExportMetricsServiceRequest, headers: dict[str, str]) -> None:
        self.headers.append(headers)
        for resource in request.resource_metrics:
            self.resources.append(texts(resource.resource.attributes))
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.metrics[metric.name] = metric
                    for point in getattr(metric, metric.WhichOneof("data")).data_points:
                        attributes = frozenset(texts(point.attributes).items())
                        self.series[metric.name, attributes][point.time_unix_nano] = point.as_double

    def of_run(self, run: str) -> list[tuple[str, dict[str, str], int, float]]:
        """Return name, attributes, Unix time in nanoseconds and value of each value of a run."""
        return [
            (name, dict(attributes), time, value)
            for (name, attributes), values in self.series.items()
            if ("memlog.run", run) in attributes
            for time, value in sorted(values.items())
        ]


def texts(attributes: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in attributes}


class HttpReceiver:
    """Receiver of OTLP over HTTP. It can be stopped and started again on the same port."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = self.store

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if store.answer == 200:
                    assert self.path == "/v1/metrics"
                    store.take(
                        service.ExportMetricsServiceRequest.FromString(body), dict(self.headers)
                    )
                answer = service.ExportMetricsServiceResponse().SerializeToString()
                self.send_response(store.answer)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class GrpcReceiver(service_grpc.MetricsServiceServicer):
    """Receiver of OTLP over gRPC. It can be stopped and started again on the same port."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._server: grpc.Server | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        if self.store.answer != 200:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a test refuses it")
        self.store.take(request, dict(context.invocation_metadata()))
        return service.ExportMetricsServiceResponse()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        service_grpc.add_MetricsServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
