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
from typing import Literal, TypeAlias

import msgspec

SCHEMA_VERSION = 1

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
    allocated: int | None
    """Held by tensors."""
    reserved: int | None
    """Held by the caching allocator."""
    peak: int | None
    """Highest ``allocated``; ``peak_source`` says of when."""
    peak_source: PeakSource | None
    inactive_split: int | None
    """Free bytes in blocks that are partly in use: what fragmentation holds back."""


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """A run begins."""

    time_us: int
    name: str | None
    project: str | None
    backends: tuple[str, ...]
    settings: dict[str, str]
    """What ``init`` was told, as text, without anything secret."""


class Parameters(msgspec.Struct, frozen=True, array_like=True, tag="parameters"):
    """Facts that hold for the whole run (versions, devices, sizes), for a tracker's parameters."""

    time_us: int
    values: dict[str, str]


class Device(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """An accelerator that the run uses, said once, before its first reading."""

    time_us: int
    name: str
    product: str | None
    """The maker's name for it, such as ``NVIDIA H100 80GB HBM3``."""
    capacity: int | None


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """An optimizer step is over."""

    time_us: int
    step: int
    rss: int | None
    """This process's resident set."""
    rss_peak: int | None
    """Its watermark; ``rss_peak_source`` says of when."""
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()


class Loss(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """A batch's loss, known later than the batch itself."""

    time_us: int
    step: int
    value: float


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """An epoch is over. Peaks are those of the epoch."""

    time_us: int
    epoch: int
    step: int | None
    """The last step of the epoch, where there was one."""
    rss: int | None
    rss_peak: int | None
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()


class Evaluation(msgspec.Struct, frozen=True, array_like=True, tag="evaluation"):
    """A loss function was called once."""

    time_us: int
    evaluation: int
    value: float | None
    rss: int | None
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None
    """The type of the exception that the call ended with."""


class Scope(msgspec.Struct, frozen=True, array_like=True, tag="scope"):
    """A watched block or function is over; sizes are changes over it."""

    time_us: int
    label: str
    duration_us: int
    rss_change: int | None
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag="recorded"):
    """A point that the trainer recorded by hand under a label."""

    time_us: int
    label: str
    rss: int | None
    devices: tuple[DeviceReading, ...] = ()


class Alert(msgspec.Struct, frozen=True, array_like=True, tag="alert"):
    """A rule's threshold was crossed."""

    time_us: int
    step: int | None
    level: Literal["info", "warning", "error"]
    rule: str
    title: str
    text: str
    value: float | None = None


class Artifact(msgspec.Struct, frozen=True, array_like=True, tag="artifact"):
    """A file was kept in the run's folder for every backend."""

    time_us: int
    name: str
    kind: str
    path: str
    """Relative to the run's folder."""
    size: int


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """What is dear to read, read by the helper process about once a second."""

    time_us: int
    step: int | None
    """The newest step in the journal at that moment; ``None`` before the first."""
    tree_pss: int | None
    """Proportional set size of the trainer and its descendants, without memlog's helper."""
    tree_processes: int | None
    available: int | None
    """Memory that the machine can still give without swapping."""
    cgroup_used: int | None
    cgroup_limit: int | None
    """The smallest limit up the cgroup's path; ``None`` where there is none."""


class Health(msgspec.Struct, frozen=True, array_like=True, tag="health"):
    """memlog's own state since the run began."""

    time_us: int
    step: int | None
    overhead_ms: float | None
    """Mean time that memlog took from the trainer's thread, a step, since the last such event."""
    overhead_total_ms: float
    dropped: dict[str, int]
    faults: dict[str, int]
    queued: bool = False
    """Whether the file system is so slow that writing moved to a queue."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The run is over."""

    time_us: int
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
    Sample,
    Health,
    End,
)


def field_names() -> dict[str, tuple[str, ...]]:
    """The fields of every event by its tag, in the order in which they are written."""
    named = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in EVENT_TYPES}
    return {**named, "DeviceReading": DeviceReading.__struct_fields__}
