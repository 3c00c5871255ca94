"""Data types that memlog and an integration exchange, and addresses with a special meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

LOCAL = "local"
"""Name of the built-in backend: the journal itself. It needs no sink."""

OFFLINE = "offline:"
"""Prefix of a run's address, if the tracker's client has written the run to a folder for a later upload. The
folder follows the prefix, as in ``offline:/home/me/wandb/offline-run-1#project/runs/1``."""
CLOSING_PARAMETERS = frozenset({"overhead_ms", "dropped", "faults"})
"""Parameters that each session sends at its end. Sessions that write to the same run send different
values. If a tracker never changes a parameter, its sink keeps the first values without a warning."""
DISABLED = "disabled:"
"""Address of a run that the user has disabled. The tracker stores no data of such a run."""

STEP_PREFIX = "memory/host/"
"""Beginning of the names of metrics that every step has, and that lie on the axis of steps."""

Axis: TypeAlias = Literal["step", "evaluation", "epoch"]
Resolution: TypeAlias = Literal["full", "bucketed"]
Fold: TypeAlias = Literal["last", "max", "min"]
"""Rule by which several values of one metric become one: keep the last, the largest or the smallest value."""


class Point(msgspec.Struct, frozen=True):
    """One value of one metric, as a tracker gets it."""

    name: str
    value: float
    axis: Axis
    index: int
    """Position on the axis: the step, evaluation or epoch."""
    time_us: int
    """Unix time of the event in microseconds. So a point that is sent again has the same time as before."""
    fold: Fold = "last"
    """Rule that combines several values of the metric into one. ``value`` may already be a combined value."""


class TrackerRun(msgspec.Struct, frozen=True):
    """Run in a tracker."""

    run_id: str
    uri: str | None = None
    """Address of the tracker in the form that its client expects, or an address that begins with `OFFLINE` or
    `DISABLED`. An address may contain a password, so memlog never stores an address unchanged."""
    name: str | None = None
    """Display name of the run."""
    link: str | None = None
    """Address of the run's page in the browser, without passwords. If there is no page, this is the command
    that shows the run."""


class Connection(msgspec.Struct, frozen=True):
    """Data that a tracker's client needs to connect.

    The data is passed in memory only, never on a disk or a command line.
    """

    uri: str | None = None
    environment: Mapping[str, str] = {}


class Target(msgspec.Struct, frozen=True):
    """Run that a sink writes to."""

    memlog_run: str
    """memlog's own run id."""
    joined: TrackerRun | None
    """The user's run, which the sink joins and never ends; ``None``: the sink opens a run of its own."""
    opened: TrackerRun | None = None
    """Run that an earlier sink opened for this target. If it is ``None``, the sink searches for such a run by
    `own_id` or `id_with_beside`. If the sink finds no run, the sink opens a run."""
    project: str | None = None
    name: str | None = None
    begun_us: int | None = None
    """Start of the run, Unix time in microseconds. Delivery may begin long after this time."""
    beside: TrackerRun | None = None
    """Run of the user that this sink must not write to. The sink groups its own run with the user's run."""
    connection: Connection = Connection()
    continues: str | None = None
    """memlog's id of the training's first session, which opened the run before a restart. The sink continues
    that run, even if the run has ended. ``None``: this session opens the run."""

    @property
    def own_id(self) -> str:
        """Id by which the sink finds memlog's own run again."""
        return self.continues or self.memlog_run

    @property
    def id_with_beside(self) -> str:
        """Id of the sink's own run: `own_id`. If ``beside`` is a run, a digest of that run's id follows.

        Two targets with different runs in ``beside`` have different ids.
        """
        if self.beside is None:
            return self.own_id
        import hashlib  # noqa: PLC0415 - 3 ms of `import memlog`, and only the helper process needs it

        # A digest, because the id of the user's run may already be as long as the tracker allows.
        digest = hashlib.blake2s(self.beside.run_id.encode(), digest_size=4).hexdigest()
        return f"{self.own_id}-{digest}"


class StoredArtifact(msgspec.Struct, frozen=True):
    """File that memlog has uploaded to a tracker."""

    name: str
    kind: str
    size: int | None
    """Bytes; ``None`` if the tracker does not report the size."""
