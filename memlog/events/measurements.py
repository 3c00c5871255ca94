"""Events that hold measurements of memory, and the losses beside them."""

from __future__ import annotations

import msgspec

from memlog.events.readings import ChildReading, DeviceReading, DeviceUse, Int, PeakSource


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """End of an optimizer step."""

    time_us: Int
    step: Int
    rss: Int | None
    """Bytes of this process's resident set."""
    rss_peak: Int | None
    """Highest ``rss``, in bytes. ``rss_peak_source`` tells whether it is the step's own."""
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
    peak that is not ``exact``. Memory is read when the phase begins and ends, and when a step or another
    phase ends in it."""
    error: str | None = None
    """Type of the exception that ended the phase."""
    step: Int | None = None
    """Last completed step; before there is one, the number of the first step. ``None`` if the run has too
    many labels, as in `Scope`."""


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """Readings that are too slow for the trainer.

    The helper process makes them about once a second, or earlier if many steps have ended meanwhile.
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
    """Memory of all ranks of a training, published in the run of rank 0.

    An event is about one step. From a run's 10,000th step on, it is about a range of steps, and has the
    highest memory of each rank in that range.
    """

    time_us: Int
    """Time at which the last rank completed the step, by that rank's clock."""
    step: Int
    reporting: Int
    """Number of ranks whose memory at this step is known. Other ranks have ended, are late, or are not
    recorded."""
    world_size: Int
    spreads: tuple[RankSpread, ...]
