"""A proxy on loopback in front of a real server, with the faults of networks."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from support.mlflow_server import free_port
from support.servers import body_of

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})


@dataclass(frozen=True)
class Fault:
    """A fault that strikes requests whose path matches `hits`."""

    status: int | None = None
    """HTTP status of the answer. The request is not passed on."""
    body: bytes | None = None
    """Body of the answer. With ``None``, the body is a few bytes that are no valid answer."""
    delay: float = 0.0
    """Seconds before the request is passed on."""
    loses_answer: bool = False
    """True if the request is passed on and carried out, and the connection breaks before the answer."""
    hits: Callable[[str], bool] = lambda _path: True


FINE = Fault(hits=lambda _path: False)


class Proxy:
    """Proxy that passes requests on to ``target``, except those that ``fault`` strikes.

    `stop` takes it down, so that connections are refused, and `start` brings it up again on the same port.

    Attributes:
        fault: The fault from now on.
        hit: Number of requests that faults have struck.
    """

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.fault = FINE
        self.hit = 0
        self.port = free_port()
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        proxy = self

        class Handler(_Handler):
            held = proxy

        ThreadingHTTPServer.daemon_threads = True
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None


class _Handler(BaseHTTPRequestHandler):
    # One request for each connection, so that a new fault strikes from the next request on.
    protocol_version = "HTTP/1.0"
    held: Proxy

    def do_GET(self) -> None:
        body = body_of(self)
        fault = self.held.fault
        struck = fault.hits(self.path)
        self.held.hit += struck
        if struck and fault.status is not None:
            body = b"<html>not now</html>" if fault.body is None else fault.body
            self._answer(fault.status, [], body)
            return
        time.sleep(fault.delay if struck else 0)
        try:
            answer, content = self._passed_on(body)
        except OSError:
            self._answer(502, [], b"<html>bad gateway</html>")
            return
        if not (struck and fault.loses_answer):
            self._answer(answer.status, answer.getheaders(), content)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_GET  # noqa: N815 - http.server's names

    def _passed_on(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        target = self.held.target
        assert target.hostname is not None
        onward = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
        try:
            onward.request(self.command, self.path, body or None, headers)
            answer = onward.getresponse()
            return answer, answer.read()
        finally:
            onward.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        ...
