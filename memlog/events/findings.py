"""Events about what memlog noticed: alerts, traces of steps, causes, failed allocations."""

from __future__ import annotations

from typing import Literal

import msgspec

from memlog.events.readings import Int, TensorInput

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


class StepInputs(msgspec.Struct, frozen=True, array_like=True, tag="step_inputs"):
    """Inputs of a step that raised the run's peak by 5 % or more.

    The last ``StepInputs`` of a run can be about a step that raised the peak by less than 5 %.
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
    """Total bytes available: the device's capacity, or the smallest limit on the process."""
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
    """On the host: total memory of the machine."""
    resident: Int | None = None
    """On the host: highest resident set of the process so far (``VmHWM``)."""
    idle: Int | None = None
    """On the host: bytes that the C library's allocator held unused when memlog handled the error."""
    inputs: tuple[TensorInput, ...] = ()
    """Inputs of the failed step. memlog finds them in the variables of the program's functions."""

    @property
    def capacity(self) -> int | None:
        """Total bytes of the device or machine on which the allocation failed, ignoring any smaller limit."""
        return self.machine if self.device == "host" else self.limit

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
