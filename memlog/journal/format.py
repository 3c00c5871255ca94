"""What stands in a journal's files, and the names of the files."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal, TypeAlias

import msgspec

from memlog.events import SCHEMA_VERSION, Event, Int, field_names
from memlog.journal.process_identity import own_birth

MAX_LINE_BYTES = 1024**2
"""A longer line is not ours."""

MAX_OFFSET = 2**62
"""Where positions in a segment end: a damaged compacted one may claim to have been longer."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises where it is given what memlog did not write."""

Role: TypeAlias = Literal["trainer", "helper"]

_SEGMENT_NAME = re.compile(
    r"(?P<process>(?:trainer|helper)-[0-9]{1,20})-(?P<segment>(?!0000)[0-9]{4}|[1-9][0-9]{4,8})\.jsonl"
)
"""As `segment_name` makes them and no others: the number alone must lead back to the file."""


class Position(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A place between two lines of one process's segments."""

    segment: Int
    """From 1."""
    offset: Int
    """Bytes from the segment's beginning."""


START = Position(1, 0)


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Which process wrote a segment; its start time tells it from a later one with the same number."""

    pid: Int
    started: float
    """Unix time in seconds, as the operating system has it: a step of the clock moves it."""
    host: str
    boot: str | None = None
    """On Linux, together with ``ticks``: the start as no clock can move it. See `Birth`."""
    ticks: Int | None = None
    program: str | None = None
    """On Linux: of the program that it ran; ``exec`` changes it."""

    @staticmethod
    def own() -> ProcessIdentity:
        """The calling process's."""
        # Imported here: `import memlog` must stay light, and only a session needs it.
        import psutil  # noqa: PLC0415

        started = psutil.Process().create_time()
        return ProcessIdentity(os.getpid(), started, os.uname().nodename, *own_birth())


class Binding(msgspec.Struct, frozen=True):
    """The tracker's run that a segment's events belong to."""

    run_id: str
    uri: str | None = None
    """Where the tracker is, without user and password."""
    name: str | None = None
    """What the tracker called the run when it was joined."""


class Compaction(msgspec.Struct, frozen=True):
    """What was done to a segment to make it smaller."""

    window: Int
    """Of so many events of one kind in a row, the peaks and the last were kept."""
    begins: Annotated[int, msgspec.Meta(ge=0, le=MAX_LINE_BYTES)]
    """Where the first record stood, in bytes from the beginning, before: after the header, one line."""


class Gap(msgspec.Struct, frozen=True):
    """Stands in a compacted segment, on a line of its own, for lines that are gone.

    Positions go on as if they still stood there, so that whoever had read so far goes on rightly.
    """

    events: Int
    delivered: Int
    """How many of these every sink had had."""
    bytes: Int
    """Length of the lines that are gone."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a segment."""

    schema: int = SCHEMA_VERSION
    run: str
    begun_us: Int
    """When the run began, Unix time in microseconds."""
    role: Role
    process: ProcessIdentity
    segment: Int
    initial_step: Int = 0
    bindings: dict[str, Binding] = {}
    """By backend; a backend that is missing has no run of the user's."""
    fields: dict[str, tuple[str, ...]] = msgspec.field(default_factory=field_names)
    """The fields of every event, in order: a journal explains itself."""
    compaction: Compaction | None = None


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A line of a segment."""

    seq: Int
    """Number of the event among those of its process, from 0."""
    event: Event


def segment_name(process: str, segment: int) -> str:
    """The file name of a process's ``segment``-th segment."""
    return f"{process}-{segment:04d}.jsonl"


def parse_segment_name(name: str) -> tuple[str, int] | None:
    """The process and number in a segment's file name; ``None`` where it is no such name."""
    match = _SEGMENT_NAME.fullmatch(name)
    return (match["process"], int(match["segment"])) if match else None
