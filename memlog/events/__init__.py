"""The events of a run, and the place of each in the training loop.

::

    memlog.init()                                   Run, Origin
    ├─ for epoch in …:
    │   ├─ for batch in …:
    │   │   ├─ loss = model(x)
    │   │   ├─ loss.backward()
    │   │   └─ optimizer.step()                     Device (first seen), Parameters (once), Batch
    │   │        └─ the loss, once it is known      Loss
    │   └─ end of the epoch                         Epoch
    ├─ minimize(loss_function):
    │   └─ every call of loss_function              Evaluation
    ├─ a watched block or function                  Scope
    ├─ a point recorded by hand                     Recorded
    ├─ end of a phase of the program                Phase
    ├─ a rule's threshold is crossed                Alert
    ├─ a step was traced                            Trace
    ├─ memory grows, or another cause was found     Finding
    ├─ a step's peak was higher than any before     StepInputs
    ├─ an allocation failed                         OutOfMemory
    ├─ a file was saved in the run's folder         Artifact
    ├─ read by the helper process                   Sample (about once a second)
    ├─ of several ranks, read by the first's helper Ranks (every step)
    ├─ memlog's own cost and errors                 Health (every ten seconds)
    memlog.finish()                                 End

Every event is an immutable record. The journal stores it as a JSON array that begins with the event's tag.
The header of a journal segment names the fields. All sizes are bytes, all times are Unix time in
microseconds, ``None`` means unknown.

New fields are added only at the end and with a default. An older reader then ignores the fields that a newer
writer adds. Any other change of the format increases ``SCHEMA_VERSION``.

Axes: ``step`` counts optimizer steps, ``evaluation`` counts calls of a loss function, ``epoch`` counts
epochs. They are never mixed.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

SCHEMA_VERSION = 1

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Whole number that trackers and databases can store. A journal line with a larger number is damaged."""

Status: TypeAlias = Literal["finished", "failed", "killed"]
"""How a run ended."""

PeakSource: TypeAlias = Literal["exact", "watermark", "sampled"]
"""How a peak was obtained.

``exact``: the peak rose in this window, so it was reached in this window. ``watermark``: the highest value
since the process began (or since another program reset it), an upper bound for this window. ``sampled``: the
highest value that was read, a lower bound."""


def now_us() -> int:
    """Return the Unix time in whole microseconds."""
    return time.time_ns() // 1000


class DeviceReading(msgspec.Struct, frozen=True, array_like=True):
    """Reading of one accelerator's allocator, in bytes; ``None`` if the backend does not report it."""

    name: str
    """Device type and index as in metric names: ``cuda0``, ``mps0``."""
    allocated: Int | None
    """Bytes that tensors hold."""
    reserved: Int | None
    """Bytes that the caching allocator holds."""
    peak: Int | None
    """Highest ``allocated``; ``peak_source`` names the period."""
    peak_source: PeakSource | None
    inactive_split: Int | None
    """Free bytes in blocks that are partly in use: memory lost to fragmentation."""


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Start of a run."""

    time_us: Int
    name: str | None
    project: str | None
    backends: tuple[str, ...]
    settings: dict[str, str]
    """Settings passed to ``init``, as text and without secrets."""


class Parameters(msgspec.Struct, frozen=True, array_like=True, tag="parameters"):
    """Facts that hold for the whole run (versions, devices, sizes), stored as the tracker's parameters."""

    time_us: Int
    values: dict[str, str]


class Origin(msgspec.Struct, frozen=True, array_like=True, tag="origin"):
    """Where a run came from, read by the helper process; ``None`` if unknown.

    Trackers get it as parameters of the run.
    """

    time_us: Int
    command: str | None
    """Command line of the trainer's process as in a shell, without secrets."""
    python: str
    """Version of Python, such as ``3.11.7``."""
    host: str
    git_commit: str | None
    """Commit of the git repository that contains the working directory."""
    git_uncommitted_changes: bool | None
    """True if files of that commit were changed or removed. Files unknown to git do not count."""
    working_directory: str | None
    """Working directory relative to the repository's folder; ``.`` for that folder itself."""


class Device(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """Accelerator that the run uses, published once, before its first reading."""

    time_us: Int
    name: str
    product: str | None
    """Product name, such as ``NVIDIA H100 80GB HBM3``."""
    capacity: Int | None
    """Total bytes; of a MIG instance its own."""
    uuid: str | None = None
    """Identity of the device, or of the MIG instance, without a prefix; ``None`` if torch reports none."""


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """End of an optimizer step."""

    time_us: Int
    step: Int
    rss: Int | None
    """Bytes of this process's resident set."""
    rss_peak: Int | None
    """Highest ``rss``, in bytes; ``rss_peak_source`` names the period."""
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()


class Loss(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """Loss of a batch, known later than the batch itself."""

    time_us: Int
    step: Int
    value: float | None
    """``None`` if the loss is not a finite number, because JSON can't store infinity or NaN."""


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """End of an epoch. Peaks are those of the epoch."""

    time_us: Int
    epoch: Int
    step: Int | None
    """Last step of the epoch; ``None`` if it had no step."""
    rss: Int | None
    rss_peak: Int | None
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()


class Evaluation(msgspec.Struct, frozen=True, array_like=True, tag="evaluation"):
    """One call of a loss function."""

    time_us: Int
    evaluation: Int
    value: float | None
    rss: Int | None
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None
    """Type of the exception that ended the call."""
    iteration: Int | None = None
    """Iteration of the optimiser that made the call, from 1; 0 is the starting point. ``None`` if nothing
    counts iterations."""


class Scope(msgspec.Struct, frozen=True, array_like=True, tag="scope"):
    """End of a watched block or function.

    Sizes are changes during the block, but ``peak`` is an absolute size.
    """

    time_us: Int
    label: str
    duration_us: Int
    rss_change: Int | None
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None
    step: Int | None = None
    """Last completed step. ``None`` before the first step, or if the run has too many labels to give each its
    own metrics."""


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag="recorded"):
    """Memory reading that the trainer recorded by hand under a label."""

    time_us: Int
    label: str
    rss: Int | None
    devices: tuple[DeviceReading, ...] = ()
    step: Int | None = None
    """Last completed step, as in `Scope`."""


class Phase(msgspec.Struct, frozen=True, array_like=True, tag="phase"):
    """End of a phase of the program, such as ``rollout``. Peaks are those of the phase."""

    time_us: Int
    label: str
    within: tuple[str, ...]
    """Labels of the phases around it, the outermost first."""
    duration_us: Int
    rss: Int | None
    rss_peak: Int | None
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()
    highest: dict[str, Int] = {}
    """Most bytes in use that were read in the phase, by ``"host"`` or the device's name: a lower bound of a
    peak that is not ``exact``. Memory is read at the phase's begin and end, and at those of the phases and
    steps in it."""
    error: str | None = None
    """Type of the exception that ended it."""
    step: Int | None = None
    """Last completed step, or the first one if there is none yet. ``None`` if the run has too many labels, as
    in `Scope`."""


OF_FINDING = "memlog: "
"""Beginning of the rule in an alert about a finding; its kind follows."""


class Alert(msgspec.Struct, frozen=True, array_like=True, tag="alert"):
    """Alert of a rule whose threshold was crossed."""

    time_us: Int
    step: Int | None
    level: Literal["info", "warning", "error"]
    rule: str
    title: str
    text: str
    value: float | None = None
    evaluation: Int | None = None
    """Call of a loss function that triggered the rule, if no step did."""
    epoch: Int | None = None
    """Epoch that triggered the rule, if neither a step nor an evaluation did."""

    @property
    def is_of_finding(self) -> bool:
        """True if it is about a `Finding`, and not about a rule of the user's."""
        return self.rule.startswith(OF_FINDING)

    @property
    def where(self) -> str | None:
        """``step 120``, ``evaluation 3`` or ``epoch 1``; ``None`` if the alert lies on no axis."""
        for axis in ("step", "evaluation", "epoch"):
            index = getattr(self, axis)
            if index is not None:
                return f"{axis} {index}"
        return None


REPORT_FILE = "report.html"
REPORT_KIND = "report"
"""Name and kind of the run's report, which memlog makes when the run ends. No file of the user's has both."""


class Artifact(msgspec.Struct, frozen=True, array_like=True, tag="artifact"):
    """File that was saved in the run's folder, to be uploaded to every backend."""

    time_us: Int
    name: str
    kind: str
    path: str
    """Path relative to the run's folder."""
    size: Int

    @property
    def is_report(self) -> bool:
        """True for memlog's report of the run: one HTML file, which loads nothing."""
        return (self.name, self.kind) == (REPORT_FILE, REPORT_KIND)


class TracedLayer(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one layer in one traced step, in bytes; ``None`` if the engine does not know it."""

    path: str
    """Path of the module, as in ``named_modules()``; for the model itself, the name of its class."""
    at_peak: Int | None
    """Bytes that the layer held at the step's peak."""
    peak: Int | None
    """Most bytes in use, by anything, while the layer ran."""
    allocated: Int | None
    """Bytes that the layer allocated itself, without its child layers."""
    kept: Int | None
    """Bytes still alive when the layer's forward returned, its child layers included: activations."""
    added: Int | None = None
    """Most bytes that one call of the layer's forward, or one uninterrupted part of its backward pass, added
    to what was in use when it began; its child layers included. ``None`` also for work outside all modules,
    and in a journal of an older memlog."""
    in_series: bool = True
    """True if trackers get this layer's figures. A run has series of a few layers only, the same in all of
    its traces."""


class TracedLine(msgspec.Struct, frozen=True, array_like=True):
    """Line of the program that allocated memory outside all modules, in one traced step."""

    line: str
    """Such as ``train.py:42 in step: cross_entropy``: file, line number, function, and the torch function it
    calls."""
    at_peak: Int
    """Bytes that the line held at the step's peak, including its part of the backward pass."""


class Trace(msgspec.Struct, frozen=True, array_like=True, tag="trace"):
    """Summary of a traced step; its raw events are in the artifact only."""

    time_us: Int
    step: Int | None
    engine: str
    exact: bool
    """True if the trace covers every allocation of a whole training iteration."""
    peak: Int | None
    """Most bytes in use during the step."""
    at_peak: dict[str, Int]
    """Bytes in use at the peak, by category (parameters, gradients, activations, …)."""
    layers: tuple[TracedLayer, ...]
    """Layers that held most at the peak, and those whose figures form series, the largest first."""
    unattributed: Int | None
    """Bytes at the peak that belong to no layer."""
    truncated: bool = False
    """True if the step had more events than a trace may hold."""
    duration_us: Int = 0
    """Duration of the traced step."""
    skipped: Int = 0
    """Steps since the run began that were due to be traced but could not be."""
    lines: tuple[TracedLine, ...] = ()
    """Lines of the program that held most at the peak outside all modules, the largest first."""


class TensorInput(msgspec.Struct, frozen=True, array_like=True):
    """Tensor that a step got as an input."""

    name: str
    """Expression in the program, such as ``tokens`` or ``batch["input_ids"]``."""
    shape: tuple[Int, ...]
    dtype: str
    """Such as ``int64``."""


class StepInputs(msgspec.Struct, frozen=True, array_like=True, tag="step_inputs"):
    """Inputs of a step that raised the peak by 5 % or more, or of the last one known to have raised it."""

    time_us: Int
    step: Int
    device: str
    """``"host"``, or the device's name as in metric names."""
    peak: Int
    """Most bytes in use between the end of the step before and the end of this one."""
    inputs: tuple[TensorInput, ...]
    like_step: Int | None = None
    """Earlier step with inputs of the same shapes and a clearly lower peak. If there is one, the inputs do
    not explain the peak."""


class OutOfMemory(msgspec.Struct, frozen=True, array_like=True, tag="out_of_memory"):
    """Failed allocation. Sizes are bytes, ``None`` if unknown."""

    time_us: Int
    step: Int | None
    """Last completed step."""
    device: str
    """``"host"``, or the device's name as in metric names."""
    requested: Int | None
    free: Int | None
    """Free bytes. On the host: free when the process's memory was highest; at the failure at least as much
    was free."""
    limit: Int | None
    """Total bytes available: the device's capacity, or the tightest limit on the process."""
    limited_by: str | None
    """Short description of what sets the limit."""
    allocated: Int | None
    """Bytes in use at the moment of ``free``."""
    reserved: Int | None
    layer: str | None
    """Path of the module that was running."""
    phase: str | None
    """``forward``, ``backward``, ``optimizer``."""
    message: str
    """Most informative line of the error."""
    free_after: Int | None = None
    """On the host: free bytes after the failed step's memory was released."""
    worker: str | None = None
    """Other process in which the allocation failed, such as ``DataLoader worker process 0``; ``None`` for the
    trainer itself."""
    raised_as: str | None = None
    """Error that ended the program, if it is a different one caused by this failure."""
    signal: str | None = None
    """Signal that ended ``worker``, such as ``"Killed"``. Lack of memory is then only the likely cause."""
    machine: Int | None = None
    """On the host: total memory of the machine."""
    resident: Int | None = None
    """On the host: highest resident set of the process so far (``VmHWM``)."""
    idle: Int | None = None
    """On the host: bytes that the C library's allocator held unused when memlog handled the error."""
    inputs: tuple[TensorInput, ...] = ()
    """Inputs of the step that failed, as far as its variables show them."""

    @property
    def capacity(self) -> int | None:
        """Total bytes of the device or machine that failed, ignoring any limit."""
        return self.machine if self.device == "host" else self.limit

    @property
    def is_implausible(self) -> bool:
        """True if the request was larger than the whole capacity."""
        return bool(self.capacity) and (self.requested or 0) > (self.capacity or 0)


class Finding(msgspec.Struct, frozen=True, array_like=True, tag="finding"):
    """Cause of high or growing memory that memlog found, with its evidence."""

    time_us: Int
    step: Int | None
    """Step after which it was found; ``None`` before the first."""
    kind: str
    """Kind of cause, such as ``kept_graph`` or ``worker_process``; ``growth`` if the cause is unknown."""
    title: str
    """The finding in one sentence."""
    where: str | None
    """Variable, line, layer or process that holds the memory."""
    since_step: Int | None
    """First step of the growth."""
    rate: float | None
    """Bytes per step."""
    forecast: tuple[Int, Int] | None
    """Steps between which the limit will be reached; ``None`` if unknown or too uncertain."""
    limit: Int | None
    """Bytes available to what grows: the limit that the forecast is about."""
    evidence: tuple[str, ...] = ()
    confidence: Literal["high", "medium", "low"] = "medium"
    remedy: str | None = None


class ChildReading(msgspec.Struct, frozen=True, array_like=True):
    """Reading of one descendant of the trainer's process."""

    role: str
    """Role in the program: ``DataLoader worker 3`` (numbered by start, from 0), or the program's name."""
    pid: Int
    started: Int
    """Start of the process, Unix time in microseconds. Together with ``pid`` it identifies the process."""
    anon: Int | None
    """Resident bytes that are neither pages of mapped files nor shared memory."""
    own: Int | None = None
    """Bytes of pages that it wrote and shares with no process: not those it has in common since a fork."""


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """Memory in use on a whole device, in bytes."""

    name: str
    """As in `DeviceReading`."""
    used: Int
    """In use by all processes, and by the driver."""
    other: Int | None = None
    """``used`` without what this process's caching allocator holds: other processes, CUDA's own context and
    the libraries' buffers. ``None`` if the allocator's size changed between the last two steps."""


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """Readings that are too slow for the trainer.

    The helper process makes them about once a second, and after some fast steps.
    """

    time_us: Int
    step: Int | None
    """Newest step in the journal at that moment; ``None`` before the first."""
    tree_pss: Int | None
    """Proportional set size of the trainer and its descendants, without memlog's helper process."""
    tree_processes: Int | None
    available: Int | None
    """Bytes that the machine can still give without swapping."""
    cgroup_used: Int | None
    cgroup_limit: Int | None
    """Smallest limit on the path from the process's cgroup to the root; ``None`` if there is no limit."""
    tree_file: Int | None = None
    """Bytes of ``tree_pss`` that are pages of mapped files, which the kernel can take back when it needs
    memory."""
    children: tuple[ChildReading, ...] = ()
    """Descendants of the trainer, the oldest first; at most 32."""
    children_shared: Int | None = None
    """Shared memory in the proportional set sizes of these descendants, in bytes."""
    host_limit: Int | None = None
    """Bytes that the trainer's processes may use together: ``cgroup_limit``, or the machine's memory."""
    devices: tuple[DeviceUse, ...] = ()
    """Devices that the trainer uses, as far as the driver reports them."""


class RankSpread(msgspec.Struct, frozen=True, array_like=True):
    """One kind of memory over the ranks of a training, in bytes."""

    name: str
    """``host/rss``, or ``device/`` and a field of `DeviceReading`. A rank's devices are added up."""
    smallest: Int
    smallest_rank: Int
    mean: float
    largest: Int
    largest_rank: Int


class Ranks(msgspec.Struct, frozen=True, array_like=True, tag="ranks"):
    """Memory of all ranks of a training at one step, published in the run of rank 0."""

    time_us: Int
    """When the last of the ranks completed the step, by its own clock."""
    step: Int
    reporting: Int
    """Ranks whose memory is known. The others record nothing, or had ended, or were too late."""
    world_size: Int
    spreads: tuple[RankSpread, ...]


class Health(msgspec.Struct, frozen=True, array_like=True, tag="health"):
    """memlog's own cost and errors since the run began."""

    time_us: Int
    step: Int | None
    overhead_ms: float | None
    """Mean time per step that memlog took on the trainer's thread since the last health event."""
    overhead_total_ms: float
    dropped: dict[str, Int]
    faults: dict[str, Int]
    queued: bool = False
    """True if the file system is so slow that the journal is written through a queue."""
    unjudged: dict[str, str] = {}
    """At the end of the run: alert rules that could not be judged in the whole run, each with the reason."""
    tracing_ms: float = 0.0
    """Extra time that traced steps have taken compared with other steps, in total."""
    tracing_set_up_ms: float = 0.0
    """Extra time of the first traced steps, which set up tracing."""
    steps: Int | None = None
    """In the trainer's last health event: number of steps that ``overhead_total_ms`` covers. ``None`` in all
    others."""

    @property
    def is_closing(self) -> bool:
        """True if it is the trainer's last, about the whole run."""
        return self.steps is not None


class Exit(msgspec.Struct, frozen=True, array_like=True, tag="exit"):
    """End of the trainer's process without an `End`, as the helper process saw it."""

    time_us: Int
    code: Int | None
    """Exit code; ``None`` if a signal ended the process, or if it is unknown."""
    signal: str | None
    """Name of the signal that ended the process, such as ``SIGKILL``."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """End of a run."""

    time_us: Int
    status: Status
    reason: str | None = None


Event: TypeAlias = (
    Run
    | Parameters
    | Device
    | Batch
    | Loss
    | Epoch
    | Evaluation
    | Scope
    | Recorded
    | Phase
    | Alert
    | Artifact
    | Trace
    | Finding
    | StepInputs
    | OutOfMemory
    | Sample
    | Ranks
    | Health
    | Exit
    | End
    | Origin
)

EVENT_TYPES: tuple[type[msgspec.Struct], ...] = get_args(Event)


def field_names() -> dict[str, tuple[str, ...]]:
    """Return the fields of every event by its tag, in the order in which they are written."""
    named = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in EVENT_TYPES}
    parts: tuple[type[msgspec.Struct], ...] = (
        DeviceReading,
        TracedLayer,
        TracedLine,
        TensorInput,
        ChildReading,
        DeviceUse,
        RankSpread,
    )
    return {**named, **{part.__name__: part.__struct_fields__ for part in parts}}
