"""Events about what memlog noticed: alerts, traces of steps, causes, failed allocations."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from memlog.events.parts import Int, TensorInput

OF_FINDING = "memlog: "
"""Prefix of ``rule`` in an alert about a `Finding`. The finding's ``kind`` follows the prefix."""


class Alert(msgspec.Struct, frozen=True, array_like=True, tag="alert"):
    """Alert: a value crossed a rule's threshold, memlog found a cause of high memory, or a run failed."""

    time_us: Int
    step: Int | None
    level: Literal["info", "warning", "error"]
    rule: str
    title: str
    text: str
    value: float | None = None
    evaluation: Int | None = None
    """Index of the call of a loss function that triggered the rule, if no step did."""
    epoch: Int | None = None
    """Epoch that triggered the rule, if neither a step nor an evaluation did."""

    @property
    def is_of_finding(self) -> bool:
        """True if the alert is about a `Finding` and not about one of the user's rules."""
        return self.rule.startswith(OF_FINDING)

    @property
    def where(self) -> str | None:
        """Axis and index of the alert, such as ``step 120`` or ``epoch 1``; ``None`` if it has no index."""
        for axis in ("step", "evaluation", "epoch"):
            index = getattr(self, axis)
            if index is not None:
                return f"{axis} {index}"
        return None


class TracedLayer(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one layer in one traced step, in bytes. A figure that the tracer can't read is ``None``."""

    path: str
    """Path of the module, as in ``named_modules()``; for the model itself, the name of its class."""
    at_peak: Int | None
    """Bytes that the layer held at the step's peak."""
    peak: Int | None
    """Maximum number of bytes in use while the layer ran. All bytes count, not only the layer's own."""
    allocated: Int | None
    """Bytes that the layer allocated itself, without its child layers."""
    kept: Int | None
    """Activations: bytes that the layer's forward pass left in use. Child layers are included."""
    added: Int | None = None
    """Largest rise of the memory in use during one call of the layer's ``forward``, or during one
    uninterrupted part of the layer's backward pass. Child layers are included. ``None`` for work outside all
    modules, and in a journal of an older memlog."""
    in_series: bool = True
    """True if trackers get this layer's figures as time series. Only a few layers of a run have them."""


class TracedLine(msgspec.Struct, frozen=True, array_like=True):
    """Line of the program that allocated memory outside all modules, in one traced step."""

    line: str
    """File, line number, function, and the torch function that the line calls, such as
    ``train.py:42 in step: cross_entropy``."""
    at_peak: Int
    """Bytes that the line held at the step's peak. They include bytes that the derivative of the line's
    operation allocated in the backward pass."""


class Trace(msgspec.Struct, frozen=True, array_like=True, tag="trace"):
    """Summary of a traced step. The single allocations are in the trace's artifact only."""

    time_us: Int
    step: Int | None
    engine: str
    exact: bool
    """True if the trace covers every allocation of a whole training iteration."""
    peak: Int | None
    """Maximum number of bytes in use during the step."""
    at_peak: dict[str, Int]
    """Bytes in use at the peak, by category (parameters, gradients, activations, …)."""
    layers: tuple[TracedLayer, ...]
    """Layers that held the most bytes at the peak, and layers with ``in_series``. The largest comes first."""
    unattributed: Int | None
    """Bytes at the peak that belong to no layer."""
    truncated: bool = False
    """True if the step had more events than a trace stores. The figures nevertheless cover all events."""
    duration_us: Int = 0
    """Duration of the traced step."""
    skipped: Int = 0
    """Number of steps since the run's beginning that were due for a trace but could not be traced."""
    lines: tuple[TracedLine, ...] = ()
    """Program lines that held the most bytes at the peak, the largest first. Bytes of layers do not count."""
    device: str | None = None
    """The traced device: ``"host"``, or the device's name as in metric names; ``None`` in a journal of an
    older memlog."""
    kept: bool | None = None
    """True if this trace replaced the trace that the run's folder has with all allocations. The newest such
    trace is the run's worst traced step. ``None``: unknown, in a journal of an older memlog."""
    cut: bool = False
    """True if the trace covers only the first part of the step (`CUT`)."""


CUT = (
    "The trace covers only the first part of the step: memlog stopped recording when its own work had taken "
    "as long as the budget allows. So peaks are lower bounds; a larger `budget` (`--budget` of `memlog run`) "
    "traces more."
)
CUT_BRIEFLY = "the budget was used up within the step"
"""`CUT` in a few words."""


class StepInputs(msgspec.Struct, frozen=True, array_like=True, tag="step_inputs"):
    """Inputs of a step that raised the run's peak by 5 % or more.

    If the inputs are larger than any before, or if it is the run's last one, 1 % can be enough.
    """

    time_us: Int
    step: Int
    device: str
    """``"host"``, or the device's name as in metric names."""
    peak: Int
    """Maximum number of bytes in use from the end of the previous step to the end of this step."""
    inputs: tuple[TensorInput, ...]
    like_step: Int | None = None
    """Earlier step with inputs of the same shapes and a clearly lower peak. If there is such a step, the
    inputs do not explain the peak."""


class SampleLengths(msgspec.Struct, frozen=True, array_like=True):
    """Lengths of a data set's samples, as a data loader's sampler, data set or collator tells them."""

    source: str
    """Place of the lengths, such as ``lengths of LengthGroupedSampler``."""
    longest: Int
    """Length of the longest sample, or the length to which the collator truncates if that is less."""
    samples: Int
    """Number of samples; 0 if only the collator's length is known."""
    tail: tuple[Int, ...] = ()
    """The first value is a length that half of the samples have or exceed, the second one a length that a
    quarter have or exceed, and so on."""
    is_random: bool = False
    """True if each batch has samples of random lengths; False: unknown, or batches of similar lengths."""
    takes_all: bool = False
    """True if the sampler takes every sample: it is one of torch's, or has the lengths; False: unknown."""


class PeaksBySize(msgspec.Struct, frozen=True, array_like=True, tag="peaks_by_size"):
    """Peaks of steps, by the size of the input's dimension that they follow. The newest event counts."""

    time_us: Int
    step: Int
    device: str
    """``"host"``, or the device's name as in metric names."""
    name: str
    """The input's name in the program."""
    dimension: Int
    is_length: bool
    """True for a sequence length."""
    points: tuple[tuple[Int, Int], ...]
    """Sizes, and the peaks in bytes of steps with inputs of these sizes. Smallest size first."""
    largest: Int
    """Largest size seen so far."""
    steps: Int
    """Number of steps so far."""
    batch: Int | None = None
    """Size of the input's first dimension in the step with the largest size; ``None``: ``dimension`` is 0."""
    grows: bool = False
    """True if the size grows from step to step, as in a data set that is sorted by length."""
    lengths: SampleLengths | None = None
    """Lengths of the data set's samples; ``None``: unknown."""


class DeviceProcess(msgspec.Struct, frozen=True, array_like=True):
    """Another process that uses a device."""

    pid: Int
    used: Int | None
    """Bytes of the device that the process uses; ``None`` if the driver does not tell."""
    name: str | None = None
    """The program's name; ``None`` if it is unknown, as for a process outside this container."""
    is_child: bool = False
    """True if the training process or one of its descendants started the process."""
    is_rank: bool = False
    """True if the process is another rank of the training: the same launcher started both."""


class DeviceState(msgspec.Struct, frozen=True, array_like=True):
    """State of a device and of its caching allocator at a failed allocation.

    Sizes are bytes, ``None`` if unknown.
    """

    free: Int | None = None
    """Free bytes of the whole device, whatever part of it this process may use."""
    outside: Int | None = None
    """Bytes in use on the device that this process's caching allocator does not hold. They belong to other
    processes, CUDA's own context, and libraries."""
    others: Int | None = None
    """Bytes that other processes use, as the driver tells."""
    processes: tuple[DeviceProcess, ...] = ()
    """Other processes that use the device, the largest first."""
    in_pools: Int | None = None
    """Bytes that the allocator holds in private pools: those of CUDA graphs and of ``torch.cuda.MemPool``."""
    unused_in_pools: Int | None = None
    """Bytes of ``in_pools`` that no tensor uses."""
    of_graphs: bool = False
    """True if all private pools were made by captures of CUDA graphs."""
    largest_unused: Int | None = None
    """Largest block that the allocator holds outside private pools, that no tensor uses, and that the failed
    request could use: of its stream, and of its size class (small or large)."""
    expandable: bool | None = None
    """True if the allocator uses expandable segments."""
    model: Int | None = None
    """Bytes of parameters, buffers and gradients on the device, of the modules that the failing step uses."""
    unused_of_streams: Int | None = None
    """Bytes that no tensor uses in segments of other streams than that of the failed request. Only
    allocations on those streams can use them."""
    allowed: Int | None = None
    """Bytes of the device that torch's memory fraction allows this process; ``None``: no fraction is set."""
    shares_host: bool = False
    """True if the device has no memory of its own, but uses the host's. Then ``free`` are the bytes that the
    machine can still give, and ``outside`` is unknown."""


class HeldTensors(msgspec.Struct, frozen=True, array_like=True):
    """Tensors on the failed device in a container of the program, such as a list of batches."""

    name: str | None
    """Variable of a running function, or an attribute of one, that holds the container. ``None``: the tensors
    are in no known container."""
    tensors: Int
    size: Int
    """Bytes of the tensors. Weights, gradients and optimizer state do not count."""


class GraphInUse(msgspec.Struct, frozen=True, array_like=True):
    """Graphs for a backward pass that were recorded before the running call of a model."""

    name: str
    """Variable of a running function that keeps the graphs."""
    uses: Int
    """Number of times that the graphs use a parameter; for half of the parameters, at least this number."""


Activity: TypeAlias = Literal[
    "evaluation",
    "generation",
    "optimizer state",
    "model to the device",
    "copy of the model",
    "DDP buckets",
    "pinned memory",
]
"""Work during which an allocation failed, as far as the program's functions show it.

- ``evaluation``: forward pass of a model in evaluation mode.
- ``generation``: forward pass that uses a cache of keys and values.
- ``optimizer state``: an optimizer's step that makes its state.
- ``model to the device``: ``model.to(device)`` or ``model.cuda()``.
- ``copy of the model``: ``copy.deepcopy``, or the clone of a ``state_dict``.
- ``DDP buckets``: ``DistributedDataParallel`` makes the buckets of its gradients.
- ``pinned memory``: an allocation of page-locked memory of the host."""


class OutOfMemory(msgspec.Struct, frozen=True, array_like=True, tag="out_of_memory"):
    """Failed allocation. Sizes are bytes, ``None`` if unknown."""

    time_us: Int
    step: Int | None
    """Last completed step."""
    device: str
    """``"host"``, or the device's name as in metric names."""
    requested: Int | None
    free: Int | None
    """Free bytes at the failure. On the host, the value is only a lower bound: the bytes that were free when
    the process used the most memory."""
    limit: Int | None
    """Total bytes available: the device's capacity, or the smallest limit on the process. If the process may
    use only a fraction of a device, and this limit is the tighter one, the bytes of the fraction."""
    limited_by: str | None
    """Short description of what sets the limit."""
    allocated: Int | None
    """Bytes in use at the same moment as ``free``."""
    reserved: Int | None
    layer: str | None
    """Path of the module that was running."""
    phase: str | None
    """Phase in which the allocation failed: ``forward``, ``backward`` or ``optimizer``."""
    message: str
    """Most informative line of the error."""
    free_after: Int | None = None
    """On the host: free bytes after the failed step's memory was released."""
    worker: str | None = None
    """Process in which the allocation failed, such as ``DataLoader worker process 0``; ``None``: the
    trainer itself."""
    raised_as: str | None = None
    """Later error, which the failed allocation caused and which ended the program."""
    signal: str | None = None
    """Signal that ended ``worker``, such as ``"Killed"``. Lack of memory is then only the likely cause."""
    machine: Int | None = None
    """Total memory of the machine or device. For a device, ``None`` in a journal of an older memlog."""
    resident: Int | None = None
    """On the host: highest resident set of the process so far (``VmHWM``)."""
    idle: Int | None = None
    """On the host: bytes that the C library's allocator held unused when memlog handled the error."""
    inputs: tuple[TensorInput, ...] = ()
    """Inputs of the failed step. memlog finds them in the variables of the program's functions."""
    state: DeviceState | None = None
    """State of the device; ``None`` on the host, and if memlog did not see the failure itself."""
    line: str | None = None
    """Line of the program that made the request, such as ``train.py:42 in save``."""
    thread: str | None = None
    """Name of the thread that made the request; ``None``: the main thread."""
    gradients: bool | None = None
    """True if operations recorded a graph for a backward pass (no ``torch.no_grad()``)."""
    activity: Activity | None = None
    subject: str | None = None
    """Name of what ``activity`` is about, such as the optimizer's class."""
    size: Int | None = None
    """Bytes of what ``activity`` makes or holds: the whole state of the optimizer, the cache of keys and
    values, the model, or the pinned memory in use."""
    caught: bool = False
    """True if the program caught the error and ended with another one, ``raised_as``."""
    held: HeldTensors | None = None
    """Container that holds the most bytes of the failed device; ``None``: none was found."""
    graph: GraphInUse | None = None
    """Graphs of earlier forward passes; ``None``: none was found."""
    batch: Int | None = None
    """Batch size that a search for the largest one tried. Without a search, that of a failed backward pass
    whose `inputs` are unknown. ``None``: unknown."""

    @property
    def capacity(self) -> int | None:
        """Total bytes of the device or machine on which the allocation failed, ignoring any smaller limit."""
        if self.device == "host" or self.machine is not None:
            return self.machine
        return self.limit

    @property
    def is_implausible(self) -> bool:
        """True if the request was larger than the whole capacity."""
        return bool(self.capacity) and (self.requested or 0) > (self.capacity or 0)


class Finding(msgspec.Struct, frozen=True, array_like=True, tag="finding"):
    """Cause of high or growing memory that memlog found, with its evidence."""

    time_us: Int
    step: Int | None
    """Last completed step when memlog found the cause; ``None`` before the first step."""
    kind: str
    """Kind of cause, such as ``kept_graph`` or ``worker_process``; ``growth`` if the cause is unknown."""
    title: str
    """The finding in one sentence."""
    where: str | None
    """Variable, line, layer or process that holds the memory."""
    since_step: Int | None
    """First step of the growth."""
    rate: float | None
    """Growth in bytes per step."""
    forecast: tuple[Int, Int] | None
    """Earliest and latest step at which memory is expected to reach ``limit``; ``None`` if too uncertain."""
    limit: Int | None
    """Limit of the memory that grows, in bytes. ``forecast`` is about this limit."""
    evidence: tuple[str, ...] = ()
    confidence: Literal["high", "medium", "low"] = "medium"
    remedy: str | None = None
    rank: Int | None = None
    """In the run of the lowest rank: the other rank whose finding this is, which ``title`` names, too."""
    memory: str | None = None
    """Memory that grows: ``"host"`` or a device's name; ``None``: other memory, or an older memlog."""
    is_part: bool = False
    """True if ``rate`` is a part of the memory's growth. The finding about its main cause has the whole."""


class Inquiry(msgspec.Struct, frozen=True, array_like=True, tag="inquiry"):
    """State of memlog's search for the cause of growth. The newest event about a series counts.

    A search ends in findings, or without result because the growth has ended. If the run ends before that,
    ``suspects`` are the cause, as far as it is known.
    """

    time_us: Int
    step: Int
    """Last completed step."""
    series: str
    """Memory that seems to grow, such as ``host.anon`` or ``cuda0.allocated``."""
    searching: bool
    """True from the beginning of a search to its end. In between, the search itself takes memory."""
    suspects: tuple[Finding, ...] = ()
    """What the search has found. Empty if the search goes on, or if its result is settled."""
    garbage: bool = False
    """True if a collection of garbage has explained the growth."""
    will_fit: bool = False
    """True if ``suspects`` are containers with a limit, and there is memory for all that they can gain."""


class HeapReading(msgspec.Struct, frozen=True, array_like=True, tag="heap"):
    """Heap of the training process after a step, over all arenas.

    Published after a few steps of each run, and every two steps while growth is examined.
    """

    time_us: Int
    step: Int
    in_use: Int
    """Bytes that the C library's allocator has given out."""
    idle: Int
    """Free bytes that the allocator keeps."""
    freed: Int | None = None
    """Bytes that a collection of garbage has freed just before; ``None`` if none was asked for."""
