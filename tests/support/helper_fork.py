"""A helper process that is a fork of a process that has imported the trackers' clients.

memlog starts its helper as a new interpreter, and a helper that delivers imports MLflow or wandb: a second or
two of a core for each script that a test starts. So a script may have a child beside it that has imported
them, and waits. When memlog starts the first helper, that child forks it and ends. The helper is the script's
child, as ever, with the streams and variables that memlog gives it, and begins where a new interpreter would.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_HELPER = ["-m", "memlog.delivery.helper"]
_UNUSED = 200
"""First of the descriptor numbers that no program uses."""


class WaitingChild:
    """The child beside a script, started before the script.

    If the child has been started, ``descriptor`` is its socket's in the script's process, and ``pid`` its id.
    """

    def __init__(self, descriptor: int = -1, pid: int = 0) -> None:
        self._owner = os.getpid()
        if descriptor >= 0:
            self._socket, self.pid = socket.socket(fileno=descriptor), pid
            os.set_inheritable(descriptor, False)
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._socket.close()
            _wait(theirs)
        theirs.close()

    def hand_over(self) -> tuple[str, str]:
        """Return the socket's descriptor and the child's pid, for the program that this process runs next."""
        self._socket.set_inheritable(True)
        return str(self._socket.detach()), str(self.pid)

    def serve(self) -> None:
        """Make the first helper that this process starts a fork of the waiting child."""
        self._real = subprocess.Popen._execute_child  # type: ignore[attr-defined] - not in typeshed

        def execute(process: Any, *arguments: Any) -> None:
            self._execute(process, *arguments)

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined] - not in typeshed

    def _execute(self, process: Any, *arguments: Any) -> None:
        """Let the waiting child become the helper. Popen has made the pipes."""
        # The positions are the same in Python 3.10 to 3.14.
        command, pass_fds, variables = arguments[0], arguments[4], arguments[6]
        if command[1:] != _HELPER or os.getpid() != self._owner:
            self._real(process, *arguments)
            return
        subprocess.Popen._execute_child = self._real  # type: ignore[attr-defined] - not in typeshed
        streams = [arguments[at] for at in (10, 13, 15)]
        request = [variables, str(Path.cwd()), list(pass_fds)]
        libc = ctypes.CDLL(None)
        # The waiting child ends, and this process inherits the helper.
        libc.prctl(_SET_CHILD_SUBREAPER, 1)
        with self._socket:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*streams, *pass_fds])
            process.pid = int(self._socket.recv(16))
        with contextlib.suppress(ChildProcessError):  # the script may ignore SIGCHLD
            os.waitpid(self.pid, 0)
        libc.prctl(_SET_CHILD_SUBREAPER, 0)
        process._child_created = True


def _wait(requests: socket.socket) -> None:
    """In the waiting child: become the helper, or end with the script."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # otherwise a reader of the script's output would wait for this process
        os.dup2(nothing, stream)
    data, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 32)
    if not data:
        os._exit(0)
    waiting = os.getpid()
    if pid := os.fork():
        requests.send(b"%d" % pid)
        os._exit(0)
    requests.close()
    while os.getppid() == waiting:
        time.sleep(0.0005)
    variables, directory, passed = json.loads(data)
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _UNUSED) for one in descriptors]
    for one in (nothing, *descriptors):
        os.close(one)
    for own, one in zip([0, 1, 2, *passed], moved, strict=True):
        os.dup2(one, own)
        os.close(one)
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    gc.enable()
    sys.path[0] = directory
    sys.argv = ["-m"]
    runpy.run_module(_HELPER[1], run_name="__main__", alter_sys=True)
    raise SystemExit


def as_main(script: str, arguments: list[str], directory: str) -> None:
    """Make this process look like ``python script …``."""
    sys.argv = [script, *arguments]
    sys.path[0] = directory
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = script


def run_main(script: str) -> None:
    """Run the script as ``python script`` runs it."""
    code = compile(Path(script).read_bytes(), script, "exec")
    exec(code, vars(sys.modules["__main__"]))  # noqa: S102 - as Python runs a script


if __name__ == "__main__":
    WaitingChild(int(sys.argv[1]), int(sys.argv[2])).serve()
    as_main(sys.argv[3], sys.argv[4:], str(Path(sys.argv[3]).parent))
    run_main(sys.argv[0])
