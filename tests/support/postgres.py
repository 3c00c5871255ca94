"""A PostgreSQL server of a test's own on loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from support.mlflow_server import free_port
from support.servers import ServerProcess

_DEBIAN = Path("/usr/lib/postgresql")
"""Debian's folder of the server's programs, which is not on the path."""


class Postgres(ServerProcess):
    """A server with a database that every user of this machine may use, as a context manager.

    PostgreSQL refuses to run as root. If the tests run as root, the server runs as the user ``postgres``, who
    can't reach pytest's folders.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"postgresql+psycopg2://tester@127.0.0.1:{self.port}/postgres"
        self._folder = Path(tempfile.mkdtemp(prefix="memlog-pg-"))
        self._user = _unprivileged()
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)

    def __enter__(self) -> Postgres:  # noqa: PYI034 - typing.Self came with Python 3.11
        try:
            initdb = [_program("initdb"), "-D", str(self._folder / "data"), "-U", "tester"]
            options = ["-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
            command = [*initdb, *options]
            subprocess.run(command, check=True, capture_output=True, **self._process_as())
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGINT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, on the same port as the first time, and wait until it accepts connections."""
        command = [
            *(_program("postgres"), "-D", str(self._folder / "data"), "-p", str(self.port)),
            *("-c", "listen_addresses=127.0.0.1"),
            *("-c", f"unix_socket_directories={self._folder}"),
        ]
        self.launch(command, self._answers, self._folder / "log", **self._process_as())

    def stop(self, number: int = signal.SIGQUIT) -> None:
        """End the server: with ``SIGQUIT`` without saving its data, with ``SIGINT`` after saving the data."""
        super().stop(number)

    def _answers(self) -> bool:
        """Return True if the server accepts connections. While it recovers, it accepts none."""
        import psycopg2

        try:
            psycopg2.connect(self.url.replace("+psycopg2", ""), connect_timeout=2).close()
        except psycopg2.OperationalError:
            return False
        return True

    def _process_as(self) -> dict[str, Any]:
        kept = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(self._folder)}
        alike: dict[str, Any] = {"cwd": self._folder, "env": kept}
        if self._user is not None:
            alike |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return alike


def _program(name: str) -> str:
    debians = sorted(_DEBIAN.glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(debians[-1]) if debians else None)
    if found is None:
        raise RuntimeError(
            f"PostgreSQL's {name} is not installed; on Debian: apt-get install postgresql"
        )
    return found


def _unprivileged() -> pwd.struct_passwd | None:
    """Return the user to run the server as, or ``None`` if the user who runs the tests is not root."""
    if os.geteuid() != 0:
        return None
    return pwd.getpwnam("postgres")
