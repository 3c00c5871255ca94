"""Trackio's real server on loopback, and its data as read by Trackio's own client."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trackio.remote_client import RemoteClient

from memlog.testing import Row, Time
from support.mlflow_server import free_port
from support.servers import ServerProcess, answers

TOKEN = "write-token-of-the-server"  # noqa: S105 - of a server on loopback
_SERVE = """
import sys, trackio
trackio.show(open_browser=False, host="127.0.0.1", server_port=int(sys.argv[1]), share=False)
"""


class TrackioServer(ServerProcess):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._client: RemoteClient | None = None
        self.url = f"http://127.0.0.1:{self._port}/"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which the user's client reaches the server."""
        return {"TRACKIO_SERVER_URL": self.url, "TRACKIO_WRITE_TOKEN": TOKEN}

    def start(self) -> None:
        command = [sys.executable, "-c", _SERVE, str(self._port)]
        variables = offline(TRACKIO_DIR=str(self._folder), TRACKIO_WRITE_TOKEN=TOKEN)
        log = self._folder.with_suffix(".log")
        self.launch(command, lambda: answers(f"{self.url}version"), log, env=variables)

    def ask(self, api: str, **arguments: Any) -> Any:
        if self._client is None:
            self._client = RemoteClient(self.url, httpx_kwargs={"verify": False})
        return self._client.predict(api_name=f"/{api}", **arguments)


def offline(**more: str) -> dict[str, str]:
    """Environment of a process that uses no network."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("TRACKIO_")}
    return {**clean, "HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False", **more}


_OTHER = frozenset({"timestamp", "step", "loss", "memlog/parameters"})


def rows_of(logs: Sequence[dict[str, Any]]) -> list[Row]:
    return [
        (name, log["step"], float("nan") if value is None else float(value))
        for log in logs
        for name, value in log.items()
        if name not in _OTHER
    ]


def times_of(logs: Sequence[dict[str, Any]]) -> list[Time]:
    return [
        (
            name,
            log["step"],
            round(datetime.fromisoformat(log["timestamp"]).timestamp() * 1e6) // 1000,
        )
        for log in logs
        for name in log
        if name not in _OTHER
    ]


def parameters_of(logs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the parameters in memlog's tables."""
    return {
        cell["name"]: cell["value"]
        for log in logs
        if "memlog/parameters" in log
        for cell in log["memlog/parameters"]["_value"]
    }
