"""Python scripts in processes that have their libraries imported already.

To import torch, MLflow or wandb takes seconds of a core: most of what a short training script takes. A server
imports them once, and such scripts run in forks of it. A fork becomes a child of this process and ends as any
process does: with its exit handlers, its traceback and its code.
"""

import ast
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

PRELOADED = {
    "accelerate": "accelerate",
    "mlflow": "mlflow",
    "phi": "phi.torch.flow",
    "lightning": "lightning.pytorch",
    "torch": "torch",
    "transformers": "transformers.trainer",
    "trl": "trl.trainer.grpo_trainer",
    "wandb": "wandb",
}
"""Libraries that take long to import, and the module that loads all of each."""

_MOST = 4
"""Servers at a time: each holds some hundred megabytes."""
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SERVERS: dict[tuple[object, ...], "ForkServer"] = {}


def libraries_of(script: str) -> tuple[str, ...]:
    """Modules of `PRELOADED` that a script imports before it does anything else."""
    found = set()
    for node in ast.parse(script).body:
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        else:
            break
    return tuple(sorted(PRELOADED[name] for name in found.intersection(PRELOADED)))


def server_pids() -> set[int]:
    """The servers of this process."""
    return {server.pid for server in _SERVERS.values()}


def end_servers() -> None:
    """Ends the servers of this process."""
    while _SERVERS:
        _SERVERS.popitem()[1].close()


class ForkServer:
    """Forks a process for each request.

    Args:
        libraries: Modules that it imports first.
        settings: Variables that Python itself reads as it starts.
    """

    def __init__(self, libraries: tuple[str, ...], settings: dict[str, str]) -> None:
        own = ("MLFLOW_", "MEMLOG_", "WANDB_", "PYTHON")
        others = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *libraries],
                env={**others, **settings},
                pass_fds=[theirs.fileno()],
                # Pipes, since Python's streams remember whether they can seek.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        self._lock = threading.Lock()  # some tests start programs from several threads
        self.pid = self._process.pid

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the pid of a new child of this process.

        Args:
            request: Its ``script``, ``arguments``, ``directory`` and ``environment``.
            streams: Descriptors of its standard streams.
        """
        data = json.dumps(request).encode()
        libc = ctypes.CDLL(None)
        with self._lock:
            # The parent of the new process ends at once, and this process inherits it.
            libc.prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [len(data).to_bytes(4, "big")], streams)
                self._socket.sendall(data)
                answer = self._socket.recv(16)
            finally:
                libc.prctl(_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError(f"the fork server has ended: {self._process.communicate()[1]!r}")
        return int(answer)

    def close(self) -> None:
        """Ends it; its forks go on."""
        self._socket.close()
        self._process.communicate(timeout=30)


class ForkedProcess(subprocess.Popen[str]):
    """A script in a fork of a server.

    Args:
        libraries: Modules that are imported before it begins.
        script: Its path.
        arguments: What follows the script in ``sys.argv``.
        directory: Its working directory.
        environment: All its variables.
        **options: Of `subprocess.Popen`: the standard streams.
    """

    def __init__(
        self,
        libraries: tuple[str, ...],
        script: Path,
        arguments: tuple[str, ...],
        directory: Path,
        environment: dict[str, str],
        **options: Any,
    ) -> None:
        settings = {k: v for k, v in environment.items() if k.startswith("PYTHON")}
        key = (libraries, *settings.items())
        if key not in _SERVERS:
            if len(_SERVERS) == _MOST:
                _SERVERS.pop(next(iter(_SERVERS))).close()
            _SERVERS[key] = ForkServer(libraries, settings)
        self._server = _SERVERS[key]
        self._request = {
            "script": str(script),
            "arguments": arguments,
            "directory": str(directory),
            "environment": environment,
        }
        super().__init__([str(script), *arguments], text=True, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """Instead of Popen's: the pipes are made, the process is not."""
        streams = [arguments[at] for at in (10, 13, 15)]  # the same in Python 3.10 to 3.14
        given = [own if one == -1 else one for own, one in enumerate(streams)]
        self.pid = self._server.fork(self._request, given)
        self._child_created = True
        for one in set(streams) - {-1}:
            os.close(one)


def _request_in_fork(requests: socket.socket) -> dict[str, Any] | None:
    """The server's loop; returns in each fork with its request, in the server without one."""
    while True:
        head, streams, _, _ = socket.recv_fds(requests, 4, 3)
        if not head:
            return None
        length, data = int.from_bytes(head, "big"), b""
        while len(data) < length:
            data += requests.recv(length - len(data))
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            if pid := os.fork():
                os.write(writer, b"%d" % pid)
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.0005)
            for own, stream in enumerate(streams):
                os.dup2(stream, own)
            for descriptor in {reader, writer, *streams} - {0, 1, 2}:
                os.close(descriptor)
            requests.close()
            request: dict[str, Any] = json.loads(data)
            return request
        os.waitpid(between, 0)
        requests.sendall(os.read(reader, 16))
        for descriptor in (reader, writer, *streams):
            os.close(descriptor)


def _serve(descriptor: int, libraries: list[str]) -> dict[str, Any] | None:
    for library in libraries:
        __import__(library)
    request = _request_in_fork(socket.socket(fileno=descriptor))
    if request is not None:
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = [request["script"], *request["arguments"]]
        sys.path[0] = request["directory"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.modules["__main__"].__file__ = request["script"]
    return request


if __name__ == "__main__" and (_request := _serve(int(sys.argv[1]), sys.argv[2:])):
    _code = compile(Path(_request["script"]).read_bytes(), _request["script"], "exec")
    exec(_code, vars(sys.modules["__main__"]))  # noqa: S102 - as Python runs a script
