"""HTTP of the double of W&B's server."""

import contextlib
import gzip
import json
import re
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from support.servers import body_of

if TYPE_CHECKING:
    from support.wandb_server import WandbServer

Data = dict[str, Any]


class WandbHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    held: "WandbServer"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        if self._is_struck():
            return
        if path in self.held.blobs:
            self._send(200, self.held.blobs[path])
        else:
            self._send(404)

    def do_PUT(self) -> None:
        body = self._body()
        if not self._is_struck():
            self.held.blobs[unquote(self.path)] = body
            self._send(200, b"")

    def do_POST(self) -> None:
        body = self._body()
        if self._is_struck():
            return
        stream = re.match(r"/files/[^/]+/([^/]+)/([^/]+)/file_stream", self.path)
        if stream:
            self.held.stream(stream[2], unquote(stream[1]), json.loads(body))
            self._send(200, b'{"exitcode": null, "limits": {}}')
        else:
            self._send(200, json.dumps(self._graphql(json.loads(body))).encode())

    def _is_struck(self) -> bool:
        """Apply the present fault; return True if it has answered the request."""
        if self.server is not self.held._http:
            # This connection is still open, although its server was stopped.
            self.close_connection = True
            return True
        fault = self.held.fault
        if not fault.hits(self.path):
            return False
        self.held.struck.append(self.path)
        time.sleep(fault.delay)
        if fault.status is None:
            return False
        self._send(fault.status, b"{}" if fault.body is None else fault.body)
        return True

    def _graphql(self, request: Data) -> Data:
        found = re.search(r"(?:query|mutation)\s+(\w+)", request.get("query", ""))
        operation = request.get("operationName") or (found[1] if found else "")
        data = self.held.answer(operation, request.get("variables") or {})
        if data is None:
            return {"errors": [{"message": f"{operation} is not doubled"}], "data": None}
        return {"data": data}

    def _body(self) -> bytes:
        body = body_of(self)
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _send(self, status: int, body: bytes = b"{}") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the client has gone
            self.wfile.write(body)
