"""Environment of memlog's processes in a Ray worker, and delivery after Ray has killed the worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from memlog import Session
from memlog.sink import TrackerRun, backends_to_look_in, writes_in_process

_ADDRESS = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_BASE_URL"}
"""Environment variable with a tracker's address, by backend. memlog passes no credentials to the workers;
the user passes them in ``runtime_env``."""


class Driver(msgspec.Struct, frozen=True):
    """Working directory, trackers' addresses and open runs of the driver's process when it calls ``fit``."""

    directory: str = ""
    addresses: dict[str, str] = {}
    """Addresses of the trackers in which memlog may open runs. Each key is the environment variable that
    passes the address to a worker."""
    runs: dict[str, TrackerRun] = {}
    """The open run of each backend, except runs to which only the driver's process can write."""

    def look(self, names: Sequence[str]) -> None:
        """Store the addresses and open runs of the named backends.

        If ``names`` is empty, store the open runs of all backends and no addresses.
        """
        for name, backend in backends_to_look_in(names).items():
            uri = backend.connection().uri
            if names and name in _ADDRESS and uri is not None:
                self.addresses[_ADDRESS[name]] = uri
            run = None if writes_in_process(backend) else backend.active_run()
            if run is not None:
                self.runs[name] = run


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables within a block, and restore them after it.

    Within the block, memlog reads the variables and its helper process inherits them. The training, which
    runs after the block, does not see them.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def deliver_without_this_process(session: Session, driver: Driver) -> None:
    """Start ``memlog sync`` if the helper process of an ended session still delivers.

    Ray kills the worker and its child processes, such as the helper. It does not kill processes that the
    children have started. So a shell starts ``memlog sync`` in the background, and ends.
    """
    folder = session.directory
    if folder is None or not _helper_lives():
        return
    command = [sys.executable, "-m", "memlog", "sync", folder.name, f"--dir={folder.parent}"]
    with (folder / "sync.log").open("ab") as log:
        subprocess.run(  # noqa: S603 - constants, and the run's own id and folder
            ["/bin/sh", "-c", '"$@" &', "sh", *command, f"--timeout={session.settings.linger:g}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=driver.directory if Path(driver.directory).is_dir() else None,
            start_new_session=True,
            check=True,
        )


def _helper_lives() -> bool:
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if "memlog.delivery.helper" in child.cmdline():  # empty for a zombie
                return True
    return False
