"""The stable document of ``memlog show --json``; docs/show-json.md describes every field.

While `SCHEMA` is unchanged, fields are only added. An unknown value is ``None``, never 0. Sizes are in bytes.
A metric has the unit that its name contains. Times are ISO 8601 in UTC.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import PeakSource
from memlog.facts.later_memory import LongestBatch, SavingCost
from memlog.facts.levels import Peak
from memlog.facts.run_fold import RunStatus
from memlog.sink import Axis

SCHEMA = 1


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    product: str | None
    capacity_bytes: int | None
    shares_host: bool = False
    """True if the device has no memory of its own, but uses the host's."""

    def __str__(self) -> str:
        """Return the product and the size, such as ``NVIDIA H100 80GB HBM3, 80.0 GiB``."""
        shared = ", shares the host's memory" if self.shares_host else ""
        return f"{self.product or 'unknown product'}, {format_bytes(self.capacity_bytes)}{shared}"


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str | None
    project: str | None
    directory: str
    begun: str | None
    ended: str | None
    """Time of the end; ``None`` if the journal has no end event."""
    newest_event: str | None
    duration_s: float | None
    """Seconds from the beginning to the end, or to the newest event if the journal has no end event."""
    host: str | None
    pid: int | None
    backends: list[str]
    """Trackers that were passed to ``init``. If empty, memlog uses those trackers in which the user
    opened a run."""
    devices: dict[str, DeviceFacts]
    parameters: dict[str, str]


class MetricSummary(msgspec.Struct, frozen=True, kw_only=True):
    axis: Axis
    first_index: int
    last_index: int
    last: float
    """Value at ``last_index``."""
    min: float
    max: float


class AlertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An alert. Its reason is a rule, a finding, or a bad end of the run."""

    time: str | None
    step: int | None
    level: Literal["info", "warning", "error"]
    rule: str
    title: str
    text: str
    value: float | None
    evaluation: int | None
    """Number of the evaluation (call of a loss function) that caused the alert; ``None``: none."""
    epoch: int | None

    @property
    def place(self) -> str:
        """Step, evaluation or epoch of the alert, such as "step 1,200"; empty if all are unknown."""
        places = {"step": self.step, "evaluation": self.evaluation, "epoch": self.epoch}
        return next((f"{axis} {at:,}" for axis, at in places.items() if at is not None), "")


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Earliest and latest step at which a limit is expected to be reached, if memory keeps growing."""

    earliest_step: int
    latest_step: int
    limit_bytes: int | None


class FindingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of high or growing memory."""

    kind: str
    """Kind of cause, such as ``kept_graph``; ``growth`` if the cause is unknown."""
    title: str
    where: str | None
    """Variable, line, layer or process that holds the memory."""
    since_step: int | None
    rate: float | None
    """Growth in bytes per step."""
    forecast: Forecast | None
    """Steps at which a limit may be reached; ``None``: too uncertain, or too far away to matter."""
    evidence: list[str]
    confidence: Literal["high", "medium", "low"]
    remedy: str | None
    step: int | None
    """Step after which memlog found the cause."""
    rank: int | None = None
    """Other rank in which it was found; ``None``: in this run."""


class ArtifactFacts(msgspec.Struct, frozen=True, kw_only=True):
    time: str | None
    name: str
    kind: str
    path: str
    """Path relative to the run's folder."""
    size_bytes: int


class TracedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The steps whose layers were traced."""

    steps: int
    worst_step: int | None
    """Number of the worst traced step; ``None`` if this step did not end, or if no peak is known."""
    worst_peak_bytes: int | None
    worst_exact: bool | None
    """True if ``worst_peak_bytes`` is exact and is the peak of a whole training iteration."""
    worst_device: str | None
    """Device of which the worst step's memory was traced: ``host``, or its name as in metric names; ``None``
    in a run of an older memlog, or if no step was traced."""
    cost_ms: float | None
    """Milliseconds that tracing added to all traced steps, without ``set_up_ms``; ``None``: unknown."""
    set_up_ms: float | None
    """Milliseconds that the first two traced steps took to set up tracing; ``None``: unknown."""


class InputFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a step got as an input."""

    name: str
    """Expression in the program, such as ``batch["input_ids"]``."""
    shape: list[int]
    dtype: str


class LargestStep(msgspec.Struct, frozen=True, kw_only=True):
    """Step that made the run's peak, or one that is less than 5 % lower."""

    step: int
    device: str
    """``host``, or the device's name as in metric names."""
    peak_bytes: int
    inputs: list[InputFacts]
    like_step: int | None
    """Earlier step with inputs of the same shapes and a lower peak. If such a step is known, the inputs do
    not explain the peak."""


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """The last and the largest of several values: sizes in memory, or changes of memory."""

    last_bytes: int | None
    largest_bytes: int | None


class ScopeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of an accelerator's memory in the watched blocks of one label."""

    allocated_change: Levels
    peak_bytes: int | None
    """Highest number of bytes in use in any of the blocks."""
    peak_source: PeakSource | None


class ScopeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The watched blocks of one label: `track_memory` blocks, or calls of a `monitor_memory` function."""

    count: int
    errors: int
    """Number of blocks that an exception ended."""
    duration_s: float
    """Seconds of all blocks together."""
    rss_change: Levels
    devices: dict[str, ScopeDevice]


class PointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The points that were recorded under one label."""

    count: int
    rss: Levels
    allocated: dict[str, Levels]
    """Allocated bytes by accelerator."""


class PhasePeak(msgspec.Struct, frozen=True, kw_only=True):
    """Peak of the process's resident set, or of a device's allocated bytes, in the phases of one label."""

    exact_bytes: int | None
    """Highest exact peak of all phases of this label. A phase's peak is exact only if the peak
    counter of the kernel or allocator rose in the phase. ``None``: the counter rose in no phase."""
    exact_step: int | None
    """Last step that was complete when the phase with ``exact_bytes`` ended."""
    at_least_bytes: int | None
    """Lower bound of the highest peak: the largest of ``exact_bytes`` and all readings in the phases."""
    made_the_peak: bool
    """True if a phase of this label was the innermost phase that reached the run's peak."""


class PhaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of one label."""

    count: int
    errors: int
    """Number of phases that an exception ended."""
    duration_s: float
    """Seconds of all phases together. The time of nested phases is included."""
    within: list[str]
    """Labels of the phases that contained the last phase of this label, the outermost first."""
    peaks: dict[str, PhasePeak]
    """Peaks by ``host`` (the resident set) or the device's name (allocated bytes)."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A tracker's run that receives the metrics of memlog's run."""

    id: str
    uri: str | None
    """The tracker's address, without user and password."""
    own: bool
    """True if memlog opened the run, False if the user did."""
    name: str | None = None
    """Name that the run had in the tracker when memlog found the run; ``None`` if unknown."""
    offset: int = 0
    """memlog's step number minus the tracker's number of the same step. memlog and the tracker count
    independently."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """State of the delivery to one tracker."""

    points: int
    stage: Literal["waiting", "delivering", "unreachable", "done"]
    problem: str | None
    runs: list[TrackedRun]


class HealthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """memlog's own state."""

    published: int
    """Number of events that the run has published."""
    thinned: int
    """Number of published events that were removed from the journal to keep its size limit."""
    delivered: dict[str, Delivery]
    dropped: dict[str, int]
    faults: dict[str, int]
    overhead_ms_per_step: float | None
    overhead_ms_total: float | None
    unjudged: dict[str, str]
    """Alert rules that memlog never judged in the run, or no longer judges, each with the reason."""
    journal_queued: bool | None
    """True if the journal was written through a queue because the file system was slow."""

    @property
    def overhead_text(self) -> str:
        """Time that memlog took from training, such as "0.041 ms a step, 12.3 ms in all"."""
        if self.overhead_ms_total is None:
            return "unknown"
        a_step = self.overhead_ms_per_step
        per_step = "" if a_step is None else f"{a_step:.3f} ms a step, "
        return f"{per_step}{self.overhead_ms_total:,.1f} ms in all"


class FailedRank(msgspec.Struct, frozen=True, kw_only=True):
    """Rank of the training that failed first, or the end of all ranks together."""

    rank: int | None
    """``None``: no rank is the cause, or it is unknown which one is."""
    run: str | None
    """Id of that rank's run; ``None`` if it is this run."""
    others: str
    """Remark on the other ranks."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    run: RunFacts
    status: RunStatus
    steps: int
    """Number of recorded steps. Steps without an event of their own (``every``) count, too."""
    metrics: dict[str, MetricSummary]
    peaks: dict[str, Peak]
    verdict: str
    """The most important finding in one sentence, else a sentence which says that nothing grew."""
    findings: list[FindingFacts]
    """Findings, the most important first."""
    alerts: list[AlertFacts]
    artifacts: list[ArtifactFacts]
    traced: TracedFacts
    largest_step: LargestStep | None
    """Step that made the peak, with its inputs. ``None``: unknown, or no inputs were found among the
    program's variables."""
    scopes: dict[str, ScopeFacts]
    """Watched blocks by label; the first 200 labels."""
    points: dict[str, PointFacts]
    """Single memory readings of `memlog.MemoryTracker` and others, by label; the first 200 labels."""
    health: HealthFacts
    omitted: dict[str, int]
    """Number of missing alerts, artifacts, scopes, points and phases, by these names. Usually empty."""
    longest_batch: LongestBatch | None = None
    """Memory that a batch with the data set's longest sample will need, or that the largest batch so far
    needed. ``None``: the peaks follow no dimension of the inputs, or the memory can't be told."""
    phases: dict[str, PhaseFacts] = {}
    """Phases by label; the first 200 labels."""
    first_step: int | None = None
    last_step: int | None = None
    """Numbers of the first and of the last step; ``None``: there was no step."""
    outcome: Literal["finding", "steady", "unsure", "too few steps"] | None = None
    """Kind of the verdict."""
    host_limit_bytes: int | None = None
    """Bytes that the training's processes may use together; ``None``: unknown."""
    cgroup_limit_bytes: int | None = None
    """Limit of the training's control group; ``None``: there is none, or it is unknown."""
    failed_rank: FailedRank | None = None
    """Rank that failed first. ``None`` if the training did not fail, or the run is not the lowest rank's."""
    survived_failures: int = 0
    """Number of failed allocations after which a step was completed, such as with a smaller batch."""
    survived_first_step: int | None = None
    survived_last_step: int | None = None
    """First and last step that was completed after such a failure; ``None``: there was none."""
    survived_batch_sizes: list[int] = []
    """Batch sizes of such failures, as far as they are known, in the order in which they were tried."""
    saving: list[SavingCost] = []
    """Memory that each way of saving a checkpoint takes in addition; empty: unknown."""
    saving_is_partial: bool = False
    """True if ``saving`` counts only parameters that are trained, and their optimizer's state."""
    failed_at: str | None = None
    """Layer, pass and line of the last failed allocation, as far as known; ``None``: none failed."""

    @property
    def names(self) -> list[str]:
        """Name passed to ``init``, followed by the names that the run has in trackers."""
        tracked = [run.name for one in self.health.delivered.values() for run in one.runs]
        return [name for name in dict.fromkeys([self.run.name, *tracked]) if name]
