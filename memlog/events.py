"""The vocabulary: what a trainer can say, and the loop in which it says it.

::

    memlog.init()                                   Run
    ├─ for epoch in …:
    │   ├─ for batch in …:
    │   │   ├─ loss = model(x)
    │   │   ├─ loss.backward()
    │   │   └─ optimizer.step()                     Device (first seen), Parameters (once), Batch
    │   │        └─ the loss, when it is known      Loss
    │   └─ end of the epoch                         Epoch
    ├─ minimize(loss_function):
    │   └─ every call of loss_function              Evaluation
    ├─ a block or function that is watched          Scope
    ├─ a point recorded by hand                     Recorded
    ├─ a rule's threshold is crossed                Alert
    ├─ a step was traced                            Trace
    ├─ an allocation failed                         OutOfMemory
    ├─ a file is kept for the run                   Artifact
    ├─ meanwhile, by the helper process             Sample (about once a second)
    ├─ now and then, by memlog of itself            Health
    memlog.finish()                                 End

Every event is an immutable record, written to the journal as a JSON array that begins with the event's
tag; a segment's header names the fields. All sizes are bytes, all times are Unix time in microseconds,
``None`` is unknown. Fields are only ever added, at the end and with a default, so that an older reader
ignores what a newer writer adds; anything else raises ``SCHEMA_VERSION``.

Axes: ``step`` counts optimizer steps, ``evaluation`` counts calls of a loss function, ``epoch`` counts
epochs. They are never mixed.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal, TypeAlias

import msgspec

SCHEMA_VERSION = 1

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number that trackers and databases can hold; a journal with a larger one is damaged there."""

Status: TypeAlias = Literal["finished", "failed", "killed"]
"""How a run ended."""

PeakSource: TypeAlias = Literal["exact", "watermark", "sampled"]
"""How a peak was obtained.

``exact``: the peak rose in this window, so it lies in it. ``watermark``: the highest value since the
process began (or since somebody reset it), an upper bound for this window. ``sampled``: the highest
value read, a lower bound.
"""


def now_us() -> int:
    """Unix time in whole microseconds."""
    return time.time_ns() // 1000


class DeviceReading(msgspec.Struct, frozen=True, array_like=True):
    """One accelerator's allocator at one moment, in bytes; ``None`` where the backend can't say."""

    name: str
    """Device and index as in metric names: ``cuda0``, ``mps0``."""
    allocated: Int | None
    """Held by tensors."""
    reserved: Int | None
    """Held by the caching allocator."""
    peak: Int | None
    """Highest ``allocated``; ``peak_source`` says of when."""
    peak_source: PeakSource | None
    inactive_split: Int | None
    """Free bytes in blocks that are partly in use: what fragmentation holds back."""


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """A run begins."""

    time_us: Int
    name: str | None
    project: str | None
    backends: tuple[str, ...]
    settings: dict[str, str]
    """What ``init`` was told, as text, without anything secret."""


class Parameters(msgspec.Struct, frozen=True, array_like=True, tag="parameters"):
    """Facts that hold for the whole run (versions, devices, sizes), for a tracker's parameters."""

    time_us: Int
    values: dict[str, str]


class Device(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """An accelerator that the run uses, said once, before its first reading."""

    time_us: Int
    name: str
    product: str | None
    """The maker's name for it, such as ``NVIDIA H100 80GB HBM3``."""
    capacity: Int | None


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """An optimizer step is over."""

    time_us: Int
    step: Int
    rss: Int | None
    """This process's resident set."""
    rss_peak: Int | None
    """Its watermark; ``rss_peak_source`` says of when."""
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()


class Loss(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """A batch's loss, known later than the batch itself."""

    time_us: Int
    step: Int
    value: float | None
    """``None`` where it is no finite number: JSON has no name for those."""


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """An epoch is over. Peaks are those of the epoch."""

    time_us: Int
    epoch: Int
    step: Int | None
    """The last step of the epoch, where there was one."""
    rss: Int | None
    rss_peak: Int | None
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()


class Evaluation(msgspec.Struct, frozen=True, array_like=True, tag="evaluation"):
    """A loss function was called once."""

    time_us: Int
    evaluation: Int
    value: float | None
    rss: Int | None
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None
    """The type of the exception that the call ended with."""
    iteration: Int | None = None
    """The optimiser's iteration that it was made for, from 1; 0 is where the optimiser starts from.
    ``None`` where nobody counts them."""


class Scope(msgspec.Struct, frozen=True, array_like=True, tag="scope"):
    """A watched block or function is over; sizes are changes over it, but ``peak`` is the level reached."""

    time_us: Int
    label: str
    duration_us: Int
    rss_change: Int | None
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None
    step: Int | None = None
    """The last step that was over; ``None`` where there was none, or where there are too many labels for
    metrics of each."""


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag="recorded"):
    """A point that the trainer recorded by hand under a label."""

    time_us: Int
    label: str
    rss: Int | None
    devices: tuple[DeviceReading, ...] = ()
    step: Int | None = None
    """As in `Scope`."""


class Alert(msgspec.Struct, frozen=True, array_like=True, tag="alert"):
    """A rule's threshold was crossed."""

    time_us: Int
    step: Int | None
    level: Literal["info", "warning", "error"]
    rule: str
    title: str
    text: str
    value: float | None = None
    evaluation: Int | None = None
    """The call of a loss function by which the rule was judged, where that was no step."""
    epoch: Int | None = None
    """Likewise, the epoch in which no step was made."""

    @property
    def where(self) -> str | None:
        """``step 120``, ``evaluation 3``, ``epoch 1``; ``None`` where it lies on no axis."""
        for axis in ("step", "evaluation", "epoch"):
            index = getattr(self, axis)
            if index is not None:
                return f"{axis} {index}"
        return None


class Artifact(msgspec.Struct, frozen=True, array_like=True, tag="artifact"):
    """A file was kept in the run's folder for every backend."""

    time_us: Int
    name: str
    kind: str
    path: str
    """Relative to the run's folder."""
    size: Int


class TracedLayer(msgspec.Struct, frozen=True, array_like=True):
    """One layer in one traced step, in bytes; ``None`` is unknown: the sampler sees no allocations."""

    path: str
    """Of the module, as in ``named_modules()``; the model's own is the name of its class."""
    at_peak: Int | None
    """Held by it when the whole step was at its peak."""
    peak: Int | None
    """Highest that was in use while it ran."""
    allocated: Int | None
    """All that it allocated by itself, without the layers inside it."""
    kept: Int | None
    """What was still alive when its forward returned, with what its children kept: activations."""


class TracedLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of the program that allocated something outside all modules, in one traced step."""

    line: str
    """``train.py:42 in step: cross_entropy``: its file, number and function, and what it calls of torch's."""
    at_peak: Int
    """Bytes that it held when the whole step was at its peak, its part of the backward pass included."""


class Trace(msgspec.Struct, frozen=True, array_like=True, tag="trace"):
    """A step was traced; what its raw events were stands in the artifact alone."""

    time_us: Int
    step: Int | None
    engine: str
    exact: bool
    """Whether every allocation was seen, of a whole training iteration."""
    peak: Int | None
    """Highest that was in use during the step."""
    at_peak: dict[str, Int]
    """What was in use then, by category (parameters, gradients, activations, …)."""
    layers: tuple[TracedLayer, ...]
    """Those that held most at the peak, the largest first."""
    unattributed: Int | None
    """Held at the peak by no layer."""
    truncated: bool = False
    """Whether there were more events than room."""
    duration_us: Int = 0
    """Of the traced step."""
    skipped: Int = 0
    """Steps that were to be traced and could not be, since the run began."""
    lines: tuple[TracedLine, ...] = ()
    """The lines of the program that held most at the peak outside all modules, the largest first."""


class OutOfMemory(msgspec.Struct, frozen=True, array_like=True, tag="out_of_memory"):
    """An allocation failed; sizes are bytes, ``None`` where nobody said."""

    time_us: Int
    step: Int | None
    """The last step that was over."""
    device: str
    """``"host"``, or as in metric names."""
    requested: Int | None
    free: Int | None
    """On the host, at the process's highest moment: when it failed it was no less."""
    limit: Int | None
    """What there is in all: the device's capacity, or what limits the process."""
    limited_by: str | None
    """What sets the limit, in a few words."""
    allocated: Int | None
    """In use, at the moment of ``free``."""
    reserved: Int | None
    layer: str | None
    """Path of the module in which it happened."""
    phase: str | None
    """``forward``, ``backward``, ``optimizer``."""
    message: str
    """The line of the error that says most."""
    free_after: Int | None = None
    """On the host: free once what the failed step held was given back."""
    worker: str | None = None
    """The other process in which it happened, such as ``DataLoader worker process 0``; ``None``: the
    trainer's own."""
    raised_as: str | None = None
    """The error that left the program, where it is another one that came of this."""
    signal: str | None = None
    """The signal that ended ``worker``, such as ``"Killed"``: that memory was the cause is then a guess."""
    machine: Int | None = None
    """On the host: all the memory that the machine has."""
    resident: Int | None = None
    """On the host: the most memory that the process ever had resident (``VmHWM``)."""
    idle: Int | None = None
    """On the host: what the C library's allocator held for later when the error was heard of, unused."""

    @property
    def capacity(self) -> int | None:
        """All that there is where it failed, whatever the limits."""
        return self.machine if self.device == "host" else self.limit

    @property
    def is_implausible(self) -> bool:
        """Whether more was asked for than there is."""
        return bool(self.capacity) and (self.requested or 0) > (self.capacity or 0)


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """What is dear to read, read by the helper process about once a second, and after some fast steps."""

    time_us: Int
    step: Int | None
    """The newest step in the journal at that moment; ``None`` before the first."""
    tree_pss: Int | None
    """Proportional set size of the trainer and its descendants, without memlog's helper."""
    tree_processes: Int | None
    available: Int | None
    """Memory that the machine can still give without swapping."""
    cgroup_used: Int | None
    cgroup_limit: Int | None
    """The smallest limit up the cgroup's path; ``None`` where there is none."""
    tree_file: Int | None = None
    """What of ``tree_pss`` is pages of mapped files, which the kernel takes back where it needs room."""


class Health(msgspec.Struct, frozen=True, array_like=True, tag="health"):
    """memlog's own state since the run began."""

    time_us: Int
    step: Int | None
    overhead_ms: float | None
    """Mean time that memlog took from the trainer's thread, a step, since the last such event."""
    overhead_total_ms: float
    dropped: dict[str, Int]
    faults: dict[str, Int]
    queued: bool = False
    """Whether the file system is so slow that writing moved to a queue."""
    unjudged: dict[str, str] = {}
    """At the end: alert rules that could not be judged in the whole run, and why."""
    tracing_ms: float = 0.0
    """What traced steps have taken beyond others so far, in all."""
    tracing_set_up_ms: float = 0.0
    """The same of the first ones, which set tracing up."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The run is over."""

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
    | Alert
    | Artifact
    | Trace
    | OutOfMemory
    | Sample
    | Health
    | End
)

EVENT_TYPES: tuple[type[msgspec.Struct], ...] = (
    Run,
    Parameters,
    Device,
    Batch,
    Loss,
    Epoch,
    Evaluation,
    Scope,
    Recorded,
    Alert,
    Artifact,
    Trace,
    OutOfMemory,
    Sample,
    Health,
    End,
)


def field_names() -> dict[str, tuple[str, ...]]:
    """The fields of every event by its tag, in the order in which they are written."""
    named = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in EVENT_TYPES}
    parts: tuple[type[msgspec.Struct], ...] = (DeviceReading, TracedLayer, TracedLine)
    return {**named, **{part.__name__: part.__struct_fields__ for part in parts}}
