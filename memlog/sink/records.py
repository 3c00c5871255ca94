"""Records that pass between memlog and an integration, and the addresses with a meaning of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

LOCAL = "local"
"""Name of the built-in backend: the journal itself. It needs no sink."""

OFFLINE = "offline:"
"""Prefix of the address of a run that the tracker's client has written to a folder for a later upload. The
folder follows: ``offline:/home/me/wandb/offline-run-1#project/runs/1``."""
CLOSING_PARAMETERS = frozenset({"overhead_ms", "dropped", "faults"})
"""Parameters that each session sends at its end. Some trackers never change a parameter. If several sessions
write to one run there, the first session's values stay, and memlog prints no warning."""
DISABLED = "disabled:"
"""Address of a run that the user has disabled: the tracker stores nothing of it."""

Axis: TypeAlias = Literal["step", "evaluation", "epoch"]
Resolution: TypeAlias = Literal["full", "bucketed"]
Fold: TypeAlias = Literal["last", "max", "min"]
"""How several values of one metric become one: levels keep the last value, peaks the largest."""


class Point(msgspec.Struct, frozen=True):
    """One value of one metric, as a tracker gets it."""

    name: str
    value: float
    axis: Axis
    index: int
    """Position on the axis: the step, evaluation or epoch."""
    time_us: int
    """The event's own Unix time in microseconds, so that a replay yields the same point."""
    fold: Fold = "last"
    """How this value was combined with others of its metric, and how to combine it further."""


class TrackerRun(msgspec.Struct, frozen=True):
    """Run in a tracker."""

    run_id: str
    uri: str | None = None
    """Address of the tracker, as its client expects it, or one that begins with `OFFLINE` or `DISABLED`. It
    may contain a password, so it is never stored unchanged."""
    name: str | None = None
    """Display name of the run."""
    link: str | None = None
    """Address of the run's page in the browser, or else the command that shows the run; without passwords."""


class Connection(msgspec.Struct, frozen=True):
    """Data that a tracker's client needs to connect.

    It is passed in memory only, never on a disk or command line.
    """

    uri: str | None = None
    environment: Mapping[str, str] = {}


class Target(msgspec.Struct, frozen=True):
    """Run that a sink writes to."""

    memlog_run: str
    """memlog's own run id. It identifies a run that an earlier sink opened."""
    joined: TrackerRun | None
    """The user's run, which the sink joins and never ends; ``None``: the sink opens a run of its own."""
    opened: TrackerRun | None = None
    """Run that an earlier sink opened for this target; ``None``: search for it by ``memlog_run``, or open
    one."""
    project: str | None = None
    name: str | None = None
    begun_us: int | None = None
    """Start of the run, Unix time in microseconds. Delivery may happen long after."""
    beside: TrackerRun | None = None
    """Run of the user that this sink must not write to. The sink groups its own run with it."""
    connection: Connection = Connection()
    continues: str | None = None
    """If the training was restarted: memlog's id of the session that opened the run. The sink continues that
    run, even if it has ended. ``None``: the run is this session's."""

    @property
    def own_id(self) -> str:
        """Id by which the sink finds memlog's own run again."""
        return self.continues or self.memlog_run


class StoredArtifact(msgspec.Struct, frozen=True):
    """File of memlog's that a tracker stores."""

    name: str
    kind: str
    size: int | None
    """Bytes; ``None`` if the tracker does not report the size."""
