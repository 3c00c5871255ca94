"""Malicious servers, which answer without end, byte by byte, or with a decompression bomb."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator

BOMB = 256 * 1024**2
"""Size of the unpacked decompression bomb, in bytes."""
_BLOCK = b" " * 65_536
_DRIP = 0.2


class Misbehaving:
    """A server on loopback that answers every request in one way.

    Attributes:
        sent: Bytes that clients took.
        asked_at: Time of the first request by `time.monotonic`, or ``None`` if no request came.
    """

    def __init__(self, answer: Callable[[Misbehaving], Iterator[bytes]]) -> None:
        self.sent = 0
        self.asked_at: float | None = None
        self.stopped = threading.Event()
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.stopped.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(65_536)
            self.asked_at = self.asked_at or time.monotonic()
            for block in self._answer(self):
                client.sendall(block)
                self.sent += len(block)
                if self.stopped.is_set():
                    return


def _endless(_: Misbehaving) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    while True:
        yield _BLOCK


def _endless_chunks(_: Misbehaving) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"10000\r\n" + _BLOCK + b"\r\n"


def _endless_headers(_: Misbehaving) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"X-More: " + b"x" * 1000 + b"\r\n"


def _redirects(server: Misbehaving) -> Iterator[bytes]:
    yield f"HTTP/1.1 302 Found\r\nLocation: {server.url}/again\r\n\r\n".encode()
    while True:
        yield _BLOCK


def _bomb(_: Misbehaving) -> Iterator[bytes]:
    packer = zlib.compressobj(1, wbits=31)
    packed = b"".join(packer.compress(_BLOCK) for _ in range(BOMB // len(_BLOCK))) + packer.flush()
    yield b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Type: application/json\r\n"
    yield f"Content-Length: {len(packed)}\r\n\r\n".encode()
    yield packed


def _drip(server: Misbehaving, content: bytes) -> Iterator[bytes]:
    for at in range(len(content)):
        yield content[at : at + 1]
        server.stopped.wait(_DRIP)


def _slow_headers(server: Misbehaving) -> Iterator[bytes]:
    yield from _drip(server, b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 10_000)


def _slow_body(server: Misbehaving) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"
    yield from _drip(server, b" " * 10_000)


def _silence(server: Misbehaving) -> Iterator[bytes]:
    server.stopped.wait(600)
    yield b""


ANSWERS: dict[str, Callable[[Misbehaving], Iterator[bytes]]] = {
    "a body without end": _endless,
    "chunks without end": _endless_chunks,
    "headers without end": _endless_headers,
    "redirects without end": _redirects,
    "a bomb of gzip": _bomb,
    "headers byte by byte": _slow_headers,
    "a body byte by byte": _slow_body,
    "silence": _silence,
}


@contextlib.contextmanager
def misbehaving_server(answer: str) -> Iterator[Misbehaving]:
    server = Misbehaving(ANSWERS[answer])
    try:
        yield server
    finally:
        server.close()
