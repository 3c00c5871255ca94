"""Parts that the tests' servers have in common."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

BOOT_TIMEOUT = 120.0
"""Maximum seconds to wait until a server has started. On two cores, MLflow takes 9 to 28."""


def answers(url: str) -> bool:
    """Return True if a server answers a request with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=1) as response:  # noqa: S310 - on loopback
            return bool(response.status == 200)
    except OSError:
        return False


def wait_until_up(process: subprocess.Popen[Any], answers: Callable[[], bool], log: Path) -> None:
    """Wait until a server answers. If it ends, or takes too long, fail with the end of its log."""
    deadline = time.monotonic() + BOOT_TIMEOUT
    while not answers():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            output = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{log.name}: the server did not come up: {output}")
        time.sleep(0.1)


class ServerProcess:
    """A server in a process of its own, which can be stopped and started again on the same port."""

    _process: subprocess.Popen[bytes] | None = None

    def launch(
        self, command: list[str], answers: Callable[[], bool], log: Path, **options: Any
    ) -> None:
        """Run the server's program, and wait until it answers."""
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, **options)
        wait_until_up(self._process, answers, log)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End the server by a signal. A second call does nothing."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    """Return a request's body, also if it was sent in chunks."""
    if request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    body = b""
    while length := int(request.rfile.readline().split(b";")[0], 16):
        body += request.rfile.read(length)
        request.rfile.readline()
    request.rfile.readline()
    return body
