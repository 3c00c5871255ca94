"""Messages from the trainer to its helper process. Each message is one line of JSON on the helper's stdin.

Credentials are passed through this pipe only: never on a command line, never on a disk.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from memlog.events import End, Health
from memlog.ranks.registration import Registration
from memlog.settings import Settings
from memlog.sink import Connection, TrackerRun

NO_JOURNAL = 4
"""Exit code of a helper that can't create its journal, as on a full disk."""
DONE = "helper-done"
"""Name of a file in a run's folder. If the file exists, the helper process has finished with this run.

The process may still work for the runs of other ranks.
"""
SETTLED = "helper-settled"
"""Name of a file in a run's folder: the number of the last `Settle` message that the helper has handled."""
ALL_DELIVERED = b"1"
"""Content of the file `DONE` if all data of the run is delivered. Otherwise the content is ``b"0"``."""
HANDED_OVER = 5
"""Exit code of a helper that has handed its run over to another rank's helper on the same machine."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message: the run and its settings."""

    run_directory: str
    begun_us: int
    trainer_pid: int
    settings: Settings
    alerts_fd: int | None = None
    """Descriptor of the pipe for the helper's alerts; ``None``: the trainer does not read them."""
    requests_fd: int | None = None
    """Descriptor of the memory for requests to the trainer, which has the same number in both processes. If
    ``shared``, it is the trainer's alone. ``None``: there is no such memory."""
    again: bool = False
    """True if this helper replaces one that ended too early."""
    registration: Registration | None = None
    """The run's position among the ranks; ``None``: the run trains alone, or its rank is not known yet."""
    shared: bool = False
    """True if another rank started the helper process. Such a helper gets no messages from this trainer."""


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Connection that a tracker's client in the training process uses."""

    backend: str
    connection: Connection


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The user's run to which all later events belong."""

    backend: str
    run: TrackerRun
    in_process: bool = False
    """True if the training process writes to the run. The run's address then has no user and password."""
    offset: int = 0
    """`memlog.journal.Binding.offset` of the run."""


class Ranked(msgspec.Struct, frozen=True, tag="ranked"):
    """Message that tells the run's rank, if the rank was unknown when the run began."""

    registration: Registration


class Lead(msgspec.Struct, frozen=True, tag="lead"):
    """Message that tells the helper to deliver the run, because no lower rank has a run."""

    backends: tuple[str, ...]
    """Trackers in which memlog opens a run."""
    name: str | None
    """Name of the run that memlog opens; ``None``: the tracker chooses one."""


class JudgeNow(msgspec.Struct, frozen=True, tag="judge_now"):
    """Message that wakes the helper, because the trainer waits for the judgement of the steps so far."""


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Message that a run of the user's begins to end, while memlog's run may go on.

    The helper process publishes what it still knows of the steps so far, and the run's report. After that it
    writes ``number`` to the file `SETTLED`.
    """

    number: int
    """Number of this message, counted from 1."""
    backend: str
    run_id: str
    """The tracker's id of the user's run."""
    end: End
    """How the user's run ends."""
    in_process: bool
    """True if the training process writes to the run. Otherwise an uploader delivers to the run."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The last message: the run is over. The helper process then delivers the remaining data."""

    end: End
    """The run's end. The journal lacks it if the disk was full."""
    health: Health
    """The trainer's last health event. The journal lacks it if the disk was full."""


Message: TypeAlias = Begin | Connect | Join | Ranked | Lead | JudgeNow | Settle | Finish

encode = msgspec.json.Encoder().encode


def decode(line: bytes) -> Message:
    """Decode one message.

    Raises:
        msgspec.MsgspecError: the line is no message.
    """
    message: Message = msgspec.json.decode(line, type=Message)
    return message
