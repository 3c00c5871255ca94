"""What the trainer tells its helper process, one JSON line each, over the helper's stdin.

The pipe is the one place where credentials travel: never a command line, never a disk.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from memlog.events import End, Health
from memlog.settings import Settings
from memlog.sink import Connection, TrackerRun


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message: which run this is."""

    run_directory: str
    begun_us: int
    trainer_pid: int
    settings: Settings
    alerts_fd: int | None = None
    """Where the trainer wants to be told of the helper's alerts."""
    again: bool = False
    """Whether it takes the place of a helper that ended too early."""


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """How a tracker's client would connect in the trainer's process, now."""

    backend: str
    connection: Connection


class Bind(msgspec.Struct, frozen=True, tag="bind"):
    """The user has a run open: events from here on belong to it."""

    backend: str
    run: TrackerRun


class WrittenInProcess(msgspec.Struct, frozen=True, tag="written_in_process"):
    """The user has a run open that the trainer's own process writes to: events from here on belong to it."""

    backend: str
    run_id: str
    uri: str | None
    """Without user and password."""
    name: str | None = None


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The run is over and its journal complete: deliver the rest, then end."""

    end: End
    """What a full disk may have kept out of the journal."""
    health: Health
    """The trainer's last word on its own state, likewise."""


Message: TypeAlias = Begin | Connect | Bind | WrittenInProcess | Finish

encode = msgspec.json.Encoder().encode


def decode(line: bytes) -> Message:
    """Reads a message.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    message: Message = msgspec.json.decode(line, type=Message)
    return message
