"""Content and names of a journal's files, and the identity of the process that wrote them."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from memlog._internal.redact import bare_address, without_credentials
from memlog.events import SCHEMA_VERSION, Event, Int, field_names
from memlog.settings import LONGEST_NAME
from memlog.sink import TrackerRun

MAX_LINE_BYTES = 1024**2
"""Maximum bytes of a line. memlog writes shorter lines, so a longer line is not memlog's."""

MAX_OFFSET = 2**62
"""Largest offset in a segment. A larger offset in a damaged segment is reduced to this value."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that decoding raises for data that memlog did not write."""

Role: TypeAlias = Literal["trainer", "helper", "ranks"]

_SEGMENT_NAME = re.compile(
    r"(?P<process>(?:trainer|helper|ranks)-[0-9]{1,20})-(?P<segment>(?!0000)[0-9]{4}|[1-9][0-9]{4,8})\.jsonl"
)
"""Pattern that matches only names made by `segment_name`. So only one name matches for a process and a
number."""


class Position(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A position between two lines of one process's segments."""

    segment: Int
    """Number of the segment, from 1."""
    offset: Int
    """Bytes from the segment's beginning."""


START = Position(1, 0)


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of the process that wrote a segment.

    The start distinguishes the process from a later process with the same pid.
    """

    pid: Int
    started: float
    """Start of the process, Unix time in seconds. If the system's clock is set, this time changes."""
    host: str
    boot: str | None = None
    """Id of the machine's boot, on Linux only. ``boot`` and ``ticks`` give the process's start without
    use of the clock. See `Birth`."""
    ticks: Int | None = None
    program: str | None = None
    """Digest that only earlier versions of memlog wrote."""

    @staticmethod
    def own() -> ProcessIdentity:
        birth = own_birth()
        return ProcessIdentity(os.getpid(), own_start(birth), os.uname().nodename, *birth)


class Binding(msgspec.Struct, frozen=True):
    """A tracker's run. The events of a segment belong to this run."""

    run_id: str
    uri: str | None = None
    """The tracker's address, without user and password."""
    name: str | None = None
    """Name that the run had in the tracker when memlog found the run."""
    link: str | None = None
    """Address of the run's page in the browser, or else the command that shows the run."""
    offset: Int = 0
    """The session's step number minus this run's step number. Each run counts its own steps. The offset is
    negative if the run's number is larger."""


def binding_of(run: TrackerRun, offset: int = 0) -> Binding:
    """Return a tracker's run in the form for the journal and the saved states: without credentials."""
    uri = None if run.uri is None else bare_address(run.uri)
    name = None if not run.name else without_credentials(run.name)[:LONGEST_NAME]
    return Binding(run.run_id, uri, name, run.link, offset)


class Compaction(msgspec.Struct, frozen=True):
    """Parameters with which a segment was compacted."""

    window: Int
    """Number of consecutive events of one type that were compared. Of these, only the peaks and the last
    event were kept."""
    begins: Annotated[int, msgspec.Meta(ge=0, le=MAX_LINE_BYTES)]
    """Offset, in bytes, that the first record had before the segment was compacted."""


class Gap(msgspec.Struct, frozen=True):
    """A line of a compacted segment that replaces removed lines.

    Offsets count the removed lines, too, so saved positions stay valid.
    """

    events: Int
    delivered: Int
    """Number of the removed events that every sink had received."""
    bytes: Int
    """Length of the removed lines."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a segment."""

    schema: int = SCHEMA_VERSION
    run: str
    begun_us: Int
    """Start of the run, Unix time in microseconds."""
    role: Role
    process: ProcessIdentity
    segment: Int
    initial_step: Int = 0
    bindings: dict[str, Binding] = {}
    """The user's run by backend; a backend without a run is missing."""
    fields: dict[str, tuple[str, ...]] = msgspec.field(default_factory=field_names)
    """Names of the fields of each type of event, in order. With them, other programs can read the journal."""
    compaction: Compaction | None = None

    @property
    def has_older_names(self) -> bool:
        """True if an older memlog with other metric names wrote the segment. See `memlog.metrics.values`."""
        return "steps" not in self.fields.get("health", ())


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A line of a segment that holds one event."""

    seq: Int
    """Number of the event among the events of its process, from 0."""
    event: Event


def segment_name(process: str, segment: int) -> str:
    return f"{process}-{segment:04d}.jsonl"


def parse_segment_name(name: str) -> tuple[str, int] | None:
    """Return the process and the number in a segment's file name; ``None`` for any other name."""
    match = _SEGMENT_NAME.fullmatch(name)
    return (match["process"], int(match["segment"])) if match else None


_STATE = 0
_START = 19
"""Indices of field 3 (`_STATE`) and field 22 (`_START`) of ``/proc/PID/stat``, see proc_pid_stat(5). The
first field after the program's name has index 0."""
_DEAD = frozenset("ZXx")
"""States of a dead process. A zombie counts as dead, too."""


class Birth(NamedTuple):
    """Start of a process, which distinguishes it from a later process with the same pid.

    The fields do not depend on the wall clock. Linux only; on other systems every field is ``None``.
    """

    boot: str | None = None
    """Id of the machine's boot."""
    ticks: int | None = None
    """Clock ticks from the boot to the process's start."""


def birth_of(pid: int) -> Birth:
    """Return the start of a process; unknown fields are ``None``.

    Raises:
        ProcessLookupError: No process has this pid, or the process is dead.
        PermissionError: This user may not read the process's start.
    """
    if not sys.platform.startswith("linux"):
        return Birth()
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(*error.args) from None
    # After the last parenthesis, because the program's name can contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[_STATE] in _DEAD:
        raise ProcessLookupError(f"process {pid} is dead")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        # This /proc shows only processes, for example because systemd mounted it with ProcSubset=pid.
        raise PermissionError(str(error)) from error
    return Birth(boot, int(fields[_START]))


def own_birth() -> Birth:
    """Return the start of the calling process; every field is ``None`` if ``/proc`` can't be read."""
    try:
        return birth_of(os.getpid())
    except OSError:
        return Birth()


def own_start(birth: Birth) -> float:
    """Return the start of the calling process by the system's clock, Unix time in seconds."""
    if birth.ticks is not None:
        with suppress(OSError, ValueError, IndexError):
            _, label, rest = Path("/proc/stat").read_bytes().partition(b"\nbtime ")
            if label:
                booted = int(rest.split(None, 1)[0])
                return booted + birth.ticks / os.sysconf("SC_CLK_TCK")
    import psutil  # noqa: PLC0415 - takes 10 ms, and Linux rarely needs it

    return psutil.Process().create_time()
