"""Servers that answer without end, or not at all."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

_BLOCK = b" " * 65_536


class Misbehaving:
    """A server on loopback that answers every request in one way.

    Attributes:
        sent: Bytes that clients took.
        asked_at: When the first request came, of `time.monotonic`; ``None`` before.
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


def _silence(server: Misbehaving) -> Iterator[bytes]:
    server.stopped.wait(600)
    yield b""


ANSWERS: dict[str, Callable[[Misbehaving], Iterator[bytes]]] = {
    "a body without end": _endless,
    "silence": _silence,
}


@contextlib.contextmanager
def misbehaving_server(answer: str) -> Iterator[Misbehaving]:
    """A server that answers so."""
    server = Misbehaving(ANSWERS[answer])
    try:
        yield server
    finally:
        server.close()
