"""The stable document of ``memlog show --json``. docs/show-json.md has the docstrings of its fields.

While `SCHEMA` is unchanged, fields are only added. An unknown value is ``None``, never 0. Sizes are in bytes.
A metric has the unit that its name contains. Times are ISO 8601 in UTC.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import PeakSource
from memlog.facts.later_memory import LongestBatch, SavingCost
from memlog.facts.levels import Peak
from memlog.facts.run_fold import RunStatus
from memlog.sink import Axis

SCHEMA = 1
IsoTime: TypeAlias = str
"""Time in UTC to the millisecond (ISO 8601), such as ``2026-09-21T14:13:20.000Z``."""


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    product: str | None
    """The maker's name of an accelerator that the run used. Its key is its name in metrics, such as
    ``cuda0``."""
    capacity_bytes: int | None
    """The device's memory; on a MIG instance, the instance's."""
    shares_host: bool = False
    """True if the device has no memory of its own, but uses the host's, as a GB10, a Jetson and Apple's GPUs
    do."""

    def __str__(self) -> str:
        """Return the product and the size, such as ``NVIDIA H100 80GB HBM3, 80.0 GiB``."""
        shared = ", shares the host's memory" if self.shares_host else ""
        return f"{self.product or 'unknown product'}, {format_bytes(self.capacity_bytes)}{shared}"


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """memlog's id of the run."""
    name: str | None
    """The ``name`` that was passed to ``init``."""
    project: str | None
    """The ``project`` that was passed to ``init``."""
    directory: str
    """The run's folder."""
    begun: IsoTime | None
    """Time of the beginning."""
    ended: IsoTime | None
    """Time of the end; ``None`` if the journal has no end event."""
    newest_event: IsoTime | None
    """Time of the newest event."""
    duration_s: float | None
    """Seconds from the beginning to the end, or to the newest event if the journal has no end event."""
    host: str | None
    """Machine of the training process."""
    pid: int | None
    """Id of the training process."""
    backends: list[str]
    """Trackers that were passed to ``init``. If empty, memlog uses those trackers in which the user
    opened a run."""
    devices: dict[str, DeviceFacts]
    parameters: dict[str, str]
    """Parameters of the whole run: command, git commit, versions, devices, settings, the model's size."""


class MetricSummary(msgspec.Struct, frozen=True, kw_only=True):
    axis: Axis
    """Unit of the indices."""
    first_index: int
    """Index of the first value."""
    last_index: int
    """Index of the last value."""
    last: float
    """Value at ``last_index``."""
    min: float
    """Smallest value."""
    max: float
    """Largest value."""


class AlertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An alert. Its reason is a rule, a finding, or a bad end of the run."""

    time: IsoTime | None
    """Time at which a rule's threshold was crossed."""
    step: int | None
    """Step of the alert."""
    level: Literal["info", "warning", "error"]
    """How serious it is."""
    rule: str
    """The rule as the user wrote it, or the reason in a few words."""
    title: str
    """The alert in one line."""
    text: str
    """Further explanation."""
    value: float | None
    """Value that crossed the threshold."""
    evaluation: int | None
    """Number of the evaluation (call of a loss function) that caused the alert; ``None``: none."""
    epoch: int | None
    """Epoch at whose end the rule was judged, if that had no step."""

    @property
    def place(self) -> str:
        """Step, evaluation or epoch of the alert, such as "step 1,200"; empty if all are unknown."""
        places = {"step": self.step, "evaluation": self.evaluation, "epoch": self.epoch}
        return next((f"{axis} {at:,}" for axis, at in places.items() if at is not None), "")


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Earliest and latest step at which a limit is expected to be reached, if memory keeps growing."""

    earliest_step: int
    """First step at which the limit may be reached."""
    latest_step: int
    """Last such step."""
    limit_bytes: int | None
    """The limit; ``None``: unknown."""


class FindingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of high or growing memory."""

    kind: str
    """Kind of cause, such as ``kept_graph``; ``growth`` if the cause is unknown."""
    title: str
    """The finding in one sentence."""
    where: str | None
    """Variable, line, layer or process that holds the memory."""
    since_step: int | None
    """First step of the growth."""
    rate: float | None
    """Growth in bytes per step."""
    forecast: Forecast | None
    """Steps at which a limit may be reached; ``None``: too uncertain, or too far away to matter."""
    evidence: list[str]
    """What was observed."""
    confidence: Literal["high", "medium", "low"]
    """How sure the cause is."""
    remedy: str | None
    """What to do."""
    step: int | None
    """Step after which memlog found the cause."""
    rank: int | None = None
    """Other rank in which it was found; ``None``: in this run."""


class ArtifactFacts(msgspec.Struct, frozen=True, kw_only=True):
    time: IsoTime | None
    """Time at which the file was saved."""
    name: str
    """Its name, which is unique in the run: a later file of the same name and kind replaces an earlier
    one."""
    kind: str
    """Its kind, such as ``flamegraph``."""
    path: str
    """Path relative to the run's folder."""
    size_bytes: int
    """Its size."""


class TracedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The steps whose layers were traced."""

    steps: int
    """Number of traced steps (``layers=True``)."""
    worst_step: int | None
    """The worst traced step: the one with the highest peak, where exact peaks take precedence. ``None``: it
    did not end, no peak is known, or no step was traced."""
    worst_peak_bytes: int | None
    """Peak of its tensors."""
    worst_exact: bool | None
    """True if ``worst_peak_bytes`` is exact and is the peak of a whole training iteration."""
    worst_cut: str | None = None
    """Reason why the worst trace covers only the first part of its step; ``None``: it was not cut."""
    worst_device: str | None
    """Device of which the worst step's memory was traced: ``host``, or its name as in metric names; ``None``
    in a run of an older memlog, or if no step was traced."""
    cost_ms: float | None
    """Milliseconds that tracing added to all traced steps, without ``set_up_ms``; ``None``: unknown."""
    set_up_ms: float | None
    """Milliseconds that the first two traced steps took to set up tracing; ``None``: unknown."""
    untraced: str | None = None
    """Reason why a run with ``layers`` has no traced step, with the remedy; ``None``: none is known."""


class InputFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a step got as an input."""

    name: str
    """Expression in the program, such as ``batch["input_ids"]``."""
    shape: list[int]
    """Size of each dimension."""
    dtype: str
    """Type of its values."""


class LargestStep(msgspec.Struct, frozen=True, kw_only=True):
    """Step that made the run's peak, or one that is less than 5 % lower."""

    step: int
    """Number of the step."""
    device: str
    """``host``, or the device's name as in metric names."""
    peak_bytes: int
    """Its peak."""
    inputs: list[InputFacts]
    """Its inputs."""
    like_step: int | None
    """Earlier step with inputs of the same shapes and a lower peak. If such a step is known, the inputs do
    not explain the peak."""


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """The last and the largest of several values: sizes in memory, or changes of memory."""

    last_bytes: int | None
    """The last value."""
    largest_bytes: int | None
    """The largest value."""


class ScopeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of an accelerator's memory in the watched blocks of one label."""

    allocated_change: Levels
    """Change of the bytes that tensors hold on the device."""
    peak_bytes: int | None
    """Highest number of bytes in use in any of the blocks."""
    peak_source: PeakSource | None
    """How the peak was obtained, as for ``peaks``."""


class ScopeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The watched blocks of one label: `track_memory` blocks, or calls of a `monitor_memory` function."""

    count: int
    """Number of complete blocks or calls of this label."""
    errors: int
    """Number of blocks that an exception ended."""
    duration_s: float
    """Seconds of all blocks together."""
    rss_change: Levels
    """Change of the process's resident set."""
    devices: dict[str, ScopeDevice]
    """Changes by accelerator."""


class PointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The points that were recorded under one label."""

    count: int
    """Number of points under this label."""
    rss: Levels
    """The process's resident set."""
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
    """Number of complete phases of this label."""
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
    """The tracker's id of a run that gets points."""
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
    """Number of points that were sent to the tracker."""
    stage: Literal["waiting", "delivering", "unreachable", "done"]
    """State: ``waiting`` is not begun, without a run to write to, or with a run that the tracker refuses."""
    problem: str | None
    """Why nothing is delivered, in one line, or which runs the tracker refuses, and the remedy."""
    runs: list[TrackedRun]
    """Runs of the tracker that get the points."""


class HealthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """memlog's own state."""

    published: int
    """Number of events that were written to the journal."""
    thinned: int
    """Number of these that were removed to keep the journal's size limit (``journal_limit``). Peaks and
    alerts are kept."""
    delivered: dict[str, Delivery]
    """State of delivery by tracker."""
    dropped: dict[str, int]
    """Number of lost events by reason."""
    faults: dict[str, int]
    """Number of errors in memlog, by place and type. Training did not see them."""
    overhead_ms_per_step: float | None
    """Milliseconds that memlog took from the training thread per step, on average."""
    overhead_ms_total: float | None
    """Milliseconds that memlog took from the training thread in all."""
    unjudged: dict[str, str]
    """Alert rules that memlog never judged in the run, or no longer judges, each with the reason."""
    journal_queued: bool | None
    """True if a slow disk made memlog write through a queue, by the last health event. If the process was
    killed, queued events are lost."""

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
    """Number of the rank; ``None``: no rank is the cause, or it is unknown which one is."""
    run: str | None
    """Id of that rank's run; ``None`` if it is this run."""
    others: str
    """Remark on the other ranks."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    """Version of this document."""
    run: RunFacts
    """The run itself."""
    status: RunStatus
    """State of the run. A run whose process ended without an end event was killed. A run on another machine
    counts as running until it has written nothing for two minutes."""
    steps: int
    """Number of recorded steps. Steps without an event of their own (``every``) count, too."""
    metrics: dict[str, MetricSummary]
    """Metrics by the names that they have in a tracker."""
    peaks: dict[str, Peak]
    """Highest values over the run, by kind of memory."""
    verdict: str
    """The most important finding in one sentence; or that nothing grew, with the evidence; or that memory
    rose and no cause is known ("Unsure")."""
    findings: list[FindingFacts]
    """Findings, the most important first."""
    alerts: list[AlertFacts]
    """Alerts, at most 1,000."""
    artifacts: list[ArtifactFacts]
    """Saved files, at most 1,000."""
    traced: TracedFacts
    """Traced steps."""
    largest_step: LargestStep | None
    """Step that made the peak, with its inputs. ``None``: unknown, or no inputs were found among the
    program's variables."""
    scopes: dict[str, ScopeFacts]
    """Watched blocks by label; the first 200 labels."""
    points: dict[str, PointFacts]
    """Single readings of `memlog.MemoryTracker` and others, by label; the first 200 labels."""
    health: HealthFacts
    """State of memlog itself."""
    omitted: dict[str, int]
    """Number of missing alerts, artifacts, scopes, points and phases, by these names. Usually empty."""
    longest_batch: LongestBatch | None = None
    """Memory that a batch with the data set's longest sample will need, or that the largest batch so far
    needed. ``None``: the peaks follow no dimension of the inputs, or the memory can't be told."""
    phases: dict[str, PhaseFacts] = {}
    """Phases by label; the first 200 labels."""
    first_step: int | None = None
    """Number of the first step; ``None``: there was none."""
    last_step: int | None = None
    """Number of the last step; ``None``: there was none."""
    outcome: Literal["finding", "steady", "unsure", "too few steps"] | None = None
    """Kind of the verdict. ``steady``: nothing grew. ``unsure``: memory rose or varied, and nothing was
    found."""
    host_limit_bytes: int | None = None
    """Bytes that the training's processes may use together; ``None``: unknown."""
    cgroup_limit_bytes: int | None = None
    """Limit of the training's control group; ``None``: there is none, or it is unknown."""
    failed_rank: FailedRank | None = None
    """Rank that failed first, in the run of the lowest rank of a training that ended badly. If it is another
    rank's run, ``status``, ``verdict`` and ``outcome`` are those of that run."""
    survived_failures: int = 0
    """Number of failed allocations after which a step was completed, such as with a smaller batch."""
    survived_first_step: int | None = None
    """First step that was completed after such a failure; ``None``: there was none."""
    survived_last_step: int | None = None
    """Last such step; ``None``: there was none."""
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
        tracked = [run.name for delivery in self.health.delivered.values() for run in delivery.runs]
        return [name for name in dict.fromkeys([self.run.name, *tracked]) if name]
