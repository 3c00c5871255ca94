"""The stable document of ``memlog show --json``; docs/show-json.md tells of every field.

Within one `SCHEMA` fields are only added. ``None`` is unknown, never 0; sizes are bytes, except in
metrics, whose names say their unit; times are ISO 8601 in UTC.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from memlog.events import PeakSource
from memlog.sink import Axis

SCHEMA = 1

RunStatus: TypeAlias = Literal["running", "finished", "failed", "killed"]
"""How a run ended, or that it did not yet."""


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator that the run used."""

    product: str | None
    capacity_bytes: int | None


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which run this is."""

    id: str
    name: str | None
    project: str | None
    directory: str
    begun: str | None
    ended: str | None
    """``None`` unless the run said that it ended."""
    newest_event: str | None
    duration_s: float | None
    """To its end, or to the newest event where it did not say that it ended."""
    host: str | None
    pid: int | None
    backends: list[str]
    """As ``init`` was told; empty: those in which a run of the user's appeared."""
    devices: dict[str, DeviceFacts]
    parameters: dict[str, str]


class MetricSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over the run."""

    axis: Axis
    first_index: int
    last_index: int
    last: float
    """At ``last_index``."""
    min: float
    max: float


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The highest value of one kind of memory over the run."""

    bytes: int | None
    source: PeakSource | None
    step: int | None
    """The step that was over when it was seen; ``None`` where that was no step."""
    evaluation: int | None
    """Likewise, the call of a loss function."""


class AlertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A rule's threshold was crossed."""

    time: str | None
    step: int | None
    level: Literal["info", "warning", "error"]
    rule: str
    title: str
    text: str
    value: float | None
    evaluation: int | None
    """The call of a loss function by which it was judged, where that was no step."""
    epoch: int | None


class ArtifactFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was kept."""

    time: str | None
    name: str
    kind: str
    path: str
    """Relative to the run's folder."""
    size_bytes: int


class TracedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The steps whose layers were traced."""

    steps: int
    worst_step: int | None
    """That which needed most; ``None``: one that was never over, or nobody can tell bytes."""
    worst_peak_bytes: int | None
    worst_exact: bool | None
    """Whether that is exact, of a whole training iteration."""
    cost_ms: float | None
    """What they took beyond others, in all; ``None``: it has not been said."""
    set_up_ms: float | None
    """The same of the first two, which set tracing up."""


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """Several sizes under one label, or several changes."""

    last_bytes: int | None
    largest_bytes: int | None


class ScopeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What watched blocks of one label did to an accelerator."""

    allocated_change: Levels
    peak_bytes: int | None
    """The highest level that was reached."""
    peak_source: PeakSource | None


class ScopeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The watched blocks, or calls of a function, of one label."""

    count: int
    errors: int
    """How many were left by an exception."""
    duration_s: float
    """Of all together."""
    rss_change: Levels
    devices: dict[str, ScopeDevice]


class PointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The points that were recorded under one label."""

    count: int
    rss: Levels
    allocated: dict[str, Levels]
    """By accelerator."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a tracker that points of this one go to."""

    id: str
    uri: str | None
    """Where the tracker is, without user and password."""
    own: bool
    """Whether memlog opened it, rather than the user."""
    name: str | None = None
    """What the tracker called it when it was joined; ``None`` where that is not known."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """How far one sink is."""

    points: int
    stage: Literal["waiting", "delivering", "unreachable", "done"]
    problem: str | None
    runs: list[TrackedRun]


class HealthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """memlog's own state."""

    published: int
    thinned: int
    """How many of these are gone from the journal, to keep its size limit."""
    delivered: dict[str, Delivery]
    dropped: dict[str, int]
    faults: dict[str, int]
    overhead_ms_per_step: float | None
    overhead_ms_total: float | None
    unjudged: dict[str, str]
    """Alert rules that could not be judged in the whole run, and why."""
    journal_queued: bool | None
    """Whether writing moved to a queue because the file system was slow."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run, summed up."""

    schema: int = SCHEMA
    run: RunFacts
    status: RunStatus
    steps: int
    """Number of the last step + 1; 0 where there was none."""
    metrics: dict[str, MetricSummary]
    peaks: dict[str, Peak]
    alerts: list[AlertFacts]
    artifacts: list[ArtifactFacts]
    traced: TracedFacts
    scopes: dict[str, ScopeFacts]
    """By label; the first 200 labels."""
    points: dict[str, PointFacts]
    """Likewise."""
    health: HealthFacts
    omitted: dict[str, int]
    """How much of a list or table is left out, since there is too much of it; usually empty."""
