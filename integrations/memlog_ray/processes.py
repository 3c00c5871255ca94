"""Environment of memlog's processes beside a worker, and the process that outlives the worker."""

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
"""Variable with a tracker's address, by backend. Credentials are left to the user's ``runtime_env``."""


class Driver(msgspec.Struct, frozen=True):
    """State of the driver when it calls ``fit``. The user sets up the trackers in the driver."""

    directory: str = ""
    addresses: dict[str, str] = {}
    """Environment variables with the addresses of the named backends, where memlog may open a run."""
    runs: dict[str, TrackerRun] = {}
    """Open runs by backend, except those that only the driver's process can write to."""

    def look(self, names: Sequence[str]) -> None:
        """Note the addresses and runs of the named backends; if none is named, the runs of all backends."""
        for name, backend in backends_to_look_in(names).items():
            uri = backend.connection().uri
            if names and name in _ADDRESS and uri is not None:
                self.addresses[_ADDRESS[name]] = uri
            run = None if writes_in_process(backend) else backend.active_run()
            if run is not None:
                self.runs[name] = run


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables that memlog's processes inherit and the training does not see."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def deliver_without_this_process(session: Session, driver: Driver) -> None:
    """Start ``memlog sync`` for an ended session whose helper process still delivers.

    Ray kills a worker's children with the worker, but not the children's own. So a shell starts the command
    in the background, and ends.
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
