"""Events that hold measurements of memory, and events that hold losses."""

from __future__ import annotations

import msgspec

from memlog.events.parts import ChildReading, DeviceReading, DeviceUse, Int, PeakSource


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """End of an optimizer step."""

    time_us: Int
    step: Int
    rss: Int | None
    """Bytes of this process's resident set."""
    rss_peak: Int | None
    """Highest ``rss``, in bytes. ``rss_peak_source`` tells whether it was reached in this step."""
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()
    rss_anon: Int | None = None
    """Bytes of ``rss`` that are neither pages of mapped files nor shared memory."""
    rss_shared: Int | None = None
    """Bytes of ``rss`` that are shared memory."""
    spaces: tuple[Int, Int | None] | None = None
    """Bytes of address space for private data (``VmData``), which also counts pages never written so far; and
    of the rest, which has mapped files, too (``None`` if hardly any of it is shared memory)."""


class Loss(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """Loss of a batch, known later than the batch itself."""

    time_us: Int
    step: Int
    value: float | None
    """The loss; ``None`` if it is not a finite number, because JSON can't store infinity or NaN."""


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """End of an epoch. Peaks are those of the epoch."""

    time_us: Int
    epoch: Int
    step: Int | None
    """Last step of the epoch; ``None`` if the epoch had no step."""
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
    """Iteration in which the optimiser called the loss function, counted from 1; 0: before the first one.
    ``None`` if memlog does not count this optimiser's iterations."""


class Scope(msgspec.Struct, frozen=True, array_like=True, tag="scope"):
    """End of a watched block or function.

    ``rss_change`` and the sizes in ``devices`` are changes during the block. Only a device's ``peak`` is an
    absolute size.
    """

    time_us: Int
    label: str
    duration_us: Int
    rss_change: Int | None
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None
    step: Int | None = None
    """Last completed step; ``None`` before the first step. Also ``None`` if the run had 50 labels before this
    label appeared. An event without a step gets no metrics."""


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag="recorded"):
    """Memory reading that the trainer recorded by hand under a label."""

    time_us: Int
    label: str
    rss: Int | None
    devices: tuple[DeviceReading, ...] = ()
    step: Int | None = None
    """Last completed step, as in `Scope`."""


class ThreadStep(msgspec.Struct, frozen=True, array_like=True, tag="thread_step"):
    """Step of a thread that trains at the same time as the thread whose steps are the session's.

    The step belongs to a run that this thread has opened in a tracker.
    """

    time_us: Int
    backend: str
    run_id: str
    uri: str | None
    """The tracker's address, without user and password."""
    step: Int
    """Number of the step in the run."""
    rss: Int


class UsersNumber(msgspec.Struct, frozen=True, array_like=True, tag="users_number"):
    """Number at which a step stands on the axis of the user's numbers, for example samples or frames.

    From this step on, memlog's steps in the run go on from the number.
    """

    time_us: Int
    backend: str
    run_id: str
    own: Int
    """memlog's number of the step in the run, without any `UsersNumber`."""
    number: Int
    """Number of the step on the user's axis; equal to ``own`` if the axis is that of memlog's steps again."""


class Phase(msgspec.Struct, frozen=True, array_like=True, tag="phase"):
    """End of a phase of the program, such as ``rollout``. Peaks are those of the phase."""

    time_us: Int
    label: str
    within: tuple[str, ...]
    """Labels of the phases that enclose this phase, the outermost first."""
    duration_us: Int
    rss: Int | None
    rss_peak: Int | None
    rss_peak_source: PeakSource | None
    devices: tuple[DeviceReading, ...] = ()
    highest: dict[str, Int] = {}
    """Highest reading of the bytes in use during the phase. The keys are ``"host"`` and the devices' names.
    The phase's peak can be higher, because memory is read only when the phase begins and ends, and when a
    step or an inner phase ends."""
    error: str | None = None
    """Type of the exception that ended the phase."""
    step: Int | None = None
    """Last completed step. If no step has completed, the number of the first step. ``None`` if the run had 50
    labels before this label appeared."""


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """Readings of memory that take too long to be made in the training process.

    The helper process reads memory about once a second, and earlier if many steps have ended since the last
    sample.
    """

    time_us: Int
    step: Int | None
    """Newest step in the journal when memory was read; ``None`` before the first step."""
    tree_pss: Int | None
    """Proportional set size of the trainer and its descendants, without memlog's helper process."""
    tree_processes: Int | None
    available: Int | None
    """Bytes that the machine can still give without swapping."""
    cgroup_used: Int | None
    cgroup_limit: Int | None
    """Smallest limit on the path from the process's cgroup to the root; ``None`` if there is no limit."""
    tree_file: Int | None = None
    """Bytes of ``tree_pss`` that are pages of mapped files. The kernel can take them back when it needs
    memory."""
    children: tuple[ChildReading, ...] = ()
    """Descendants of the trainer, the oldest first; at most 32."""
    children_shared: Int | None = None
    """Bytes of shared memory that are part of the proportional set sizes of all descendants."""
    host_limit: Int | None = None
    """Bytes that the trainer's processes may use together: the smaller of ``cgroup_limit`` and the machine's
    memory."""
    devices: tuple[DeviceUse, ...] = ()
    """Devices that the trainer uses, as far as the driver reports them."""
    tree_swap: Int | None = None
    """Bytes of the trainer and its descendants that are in swap. ``tree_pss`` does not contain them. ``None``
    also if the machine has no swap."""


class PinnedMemory(msgspec.Struct, frozen=True, array_like=True, tag="pinned"):
    """Page-locked (pinned) memory of the host in torch's caching host allocator. Published if it changed.

    The training process reads it about once a second, after some of the first steps, and at its end.
    """

    time_us: Int
    step: Int | None
    """Last completed step; ``None`` before the first step."""
    held: Int
    """Bytes in blocks in use, and in freed blocks that the allocator keeps."""
    in_use: Int
    """Bytes in blocks in use. Both sizes are those of the blocks, which can be larger than the requests."""
    peak: Int
    """Highest ``held``. ``peak_source`` tells whether it was reached since the last reading."""
    peak_source: PeakSource


class RankSpread(msgspec.Struct, frozen=True, array_like=True):
    """Smallest, mean and largest value of one kind of memory over the ranks of a training, in bytes."""

    name: str
    """Kind of memory: ``host/rss``, or ``device/`` and a field of `DeviceReading`. The values of a rank's
    devices are added up."""
    smallest: Int
    smallest_rank: Int
    mean: float
    largest: Int
    largest_rank: Int


class Ranks(msgspec.Struct, frozen=True, array_like=True, tag="ranks"):
    """Memory of all ranks of a training, published in the run of rank 0.

    An event covers one step. From a run's 10,000th step on, an event covers a range of steps, and uses the
    highest memory of each rank in that range.
    """

    time_us: Int
    """Time at which the last rank completed the step, by that rank's clock."""
    step: Int
    reporting: Int
    """Number of ranks whose memory at this step is known. The other ranks have ended, are late, or have no
    memlog run."""
    world_size: Int
    spreads: tuple[RankSpread, ...]
