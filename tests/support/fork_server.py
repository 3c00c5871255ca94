"""Python scripts in processes that have their libraries imported already.

To import torch, MLflow or wandb takes seconds of a core: most of what a short training script takes. A server
imports them once, and such scripts run in forks of it. A fork becomes a child of this process and ends as any
process does: with its exit handlers, its traceback and its code. The server of torch and MLflow is a fork of
the server of torch, and so on.
"""

import ast
import atexit
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

from support import helper_fork
from support.helper_fork import WaitingChild, as_main, run_main

PRELOADED = {
    "torch": ("torch", "torch._dynamo"),  # the first optimizer imports the second module
    # The first run in a database file imports the second module.
    "mlflow": ("mlflow", "mlflow.store.tracking.sqlalchemy_store"),
    "uvicorn": ("mlflow.server.fastapi_app", "mlflow.cli", "uvicorn.protocols.http.auto"),
    "wandb": ("wandb",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers.trainer",),
    "lightning": ("lightning.pytorch",),
    "trl": ("trl.trainer.grpo_trainer",),
    "phi": ("phi.torch.flow",),
    "hydra": ("hydra",),
}
"""Libraries that take long to import, in the order of import, and the modules that load all of each."""

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ONE_AT_A_TIME = threading.RLock()  # some tests start programs from several threads
_SERVERS: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], "ForkServer"] = {}


def libraries_of(script: str) -> tuple[str, ...]:
    """Libraries of `PRELOADED` that a script imports before it does anything else."""
    found = set()
    for node in ast.parse(script).body:
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            break
    return tuple(name for name in PRELOADED if name in found)


def server_pids() -> set[int]:
    return {server.pid for server in _SERVERS.values()}


def end_servers() -> None:
    while _SERVERS:
        _SERVERS.popitem()[1].close()


def _server_of(libraries: tuple[str, ...], settings: dict[str, str]) -> "ForkServer":
    """Return the server that has imported these libraries; start it if there is none."""
    key = (libraries, tuple(sorted(settings.items())))
    with _ONE_AT_A_TIME:
        if key not in _SERVERS:
            base = _server_of(libraries[:-1], settings) if libraries else None
            _SERVERS[key] = ForkServer(base, libraries[-1:], settings)
        return _SERVERS[key]


class ForkServer:
    """A process that forks for each request.

    It becomes a fork of ``base``, or a new process, and imports ``libraries`` of `PRELOADED` first.
    ``settings`` are the variables that Python itself reads as it starts.
    """

    _process: "subprocess.Popen[bytes] | None" = None

    def __init__(
        self, base: "ForkServer | None", libraries: tuple[str, ...], settings: dict[str, str]
    ) -> None:
        own = ("MLFLOW_", "MEMLOG_", "WANDB_", "PYTHON")
        others = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environment = {**others, **settings}
        self._socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the server
        with theirs:
            if base:
                modules = [module for name in libraries for module in PRELOADED[name]]
                request = {"modules": modules, "directory": "/", "environment": environment}
                errors = self._errors.fileno()
                self.pid = base.fork(request, [theirs.fileno(), errors, errors])
                return
            # Pipes, since Python's streams remember whether they can seek.
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            command = [sys.executable, "-m", "support.fork_server", str(theirs.fileno())]
            here, passed = Path(__file__).parents[1], [theirs.fileno()]
            self._process = subprocess.Popen(
                command, cwd=here, env=environment, pass_fds=passed, **streams
            )
            self.pid = self._process.pid

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the process id of a new child of this process.

        A request has ``directory`` and ``environment`` of the child. To run a script, it also has ``script``,
        ``arguments``, ``path`` and ``helper``. To become a server, whose standard input is its socket, it has
        ``modules`` instead of these four.
        """
        data = json.dumps(request).encode()
        libc = ctypes.CDLL(None)
        with _ONE_AT_A_TIME:
            # The parent of the new process ends at once, and this process inherits it.
            libc.prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [len(data).to_bytes(4, "big")], streams)
                self._socket.sendall(data)
                answer = self._socket.recv(16)
            finally:
                libc.prctl(_SET_CHILD_SUBREAPER, 0)
        if not answer:
            self._errors.seek(0)
            raise RuntimeError(f"the fork server has ended: {self._errors.read()}")
        return int(answer)

    def close(self) -> None:
        """End the server; its forks go on."""
        self._socket.close()
        self._errors.close()
        if self._process:
            self._process.communicate(timeout=30)
        else:
            os.waitpid(self.pid, 0)


class ForkedProcess(subprocess.Popen[str]):
    """A script in a fork of a server that has imported ``libraries`` of `PRELOADED`, in their order.

    ``modules`` is the folder that is the first on ``sys.path``. ``helper`` is True if memlog's helper, too,
    has imported the libraries; "alone" if only the helper has. ``options`` are Popen's, for the streams.
    """

    def __init__(
        self,
        libraries: tuple[str, ...],
        script: Path,
        arguments: tuple[str, ...],
        directory: Path,
        modules: Path,
        environment: dict[str, str],
        helper: Literal[False, True, "alone"] = False,
        **options: Any,
    ) -> None:
        settings = {k: v for k, v in environment.items() if k.startswith("PYTHON")}
        self._server = _server_of(libraries, settings)
        self._request = {
            "script": str(script),
            "arguments": arguments,
            "directory": str(directory),
            "path": str(modules),
            "environment": environment,
            "helper": helper,
        }
        super().__init__([str(script), *arguments], text=True, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """Fork the process, in place of Popen's method. Popen has made the pipes before."""
        streams = [arguments[at] for at in (10, 13, 15)]  # the same in Python 3.10 to 3.14
        given = [own if one == -1 else one for own, one in enumerate(streams)]
        self.pid = self._server.fork(self._request, given)
        self._child_created = True
        self._close_pipe_fds(*arguments[10:16])  # type: ignore[attr-defined] - not in typeshed


def _request_in_fork(requests: socket.socket) -> dict[str, Any] | None:
    """Serve requests. Return the request in each fork, and ``None`` in the server when the server ends."""
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


def _serve(descriptor: int) -> dict[str, Any] | None:
    request = _request_in_fork(socket.socket(fileno=descriptor))
    if request is None:
        return None
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "modules" in request:
        for module in request["modules"]:
            __import__(module)
        gc.freeze()
        own = os.dup(0)
        os.dup2(2, 0)
        return _serve(own)
    gc.unfreeze()
    if request["helper"]:
        child = WaitingChild()
        if request["helper"] == "alone":
            command = [sys.executable, helper_fork.__file__, *child.hand_over()]
            command += [request["script"], *request["arguments"]]
            os.execve(sys.executable, command, request["environment"])  # noqa: S606 - constants
        child.serve()
    gc.enable()
    as_main(request["script"], request["arguments"], request["path"])
    return request


if __name__ == "__main__":
    gc.disable()  # a collection writes to each object, and forks would then share no memory
    # The last exit handler of each fork. Without this handler, Python would search the million objects of
    # the libraries for garbage at its end, which takes a second or two.
    atexit.register(gc.freeze)
if __name__ == "__main__" and (_request := _serve(int(sys.argv[1]))):
    run_main(_request["script"])
