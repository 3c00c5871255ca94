"""Files of the user's that hide memlog's values: those of ``SummaryWriter(purge_step=N)``.

TensorBoard's reader reads a folder's files in the order of their names. If a file begins with a purge, the
reader drops all values that it has read from step N on. memlog's file comes first, so that TensorBoard shows
the user's new rows while they are written. When the user's files are complete, memlog's file can come last.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from memlog_tensorboard.event_file import records

_FIRST = 3
"""Number of records at a file's beginning in which a purge is searched."""
_DESCRIPTORS = Path("/proc")


def file_to_follow(folder: Path) -> Path | None:
    """Return the user's last event file, if one of the user's files purges and no process writes the last."""
    files = folder.glob("*tfevents*")
    users = sorted(file for file in files if "memlog-" not in file.name and file.is_file())
    if any(_purges(file) for file in users) and not _is_open(users[-1]):
        return users[-1]
    return None


def _purges(file: Path) -> bool:
    with file.open("rb") as opened:
        first = [Event.FromString(record) for record in islice(records(opened), _FIRST)]
    return any(event.session_log.status == SessionLog.START for event in first)


def _is_open(file: Path) -> bool:
    """Return True if a process has the file open, or if the system does not tell."""
    known, links = file.stat(), _DESCRIPTORS.glob("[0-9]*/fd/*")
    if not (_DESCRIPTORS / "self" / "fd").exists():
        return True
    for link in links:
        with suppress(OSError):  # the process has ended, or belongs to another user
            if os.path.samestat(link.stat(), known):
                return True
    return False
