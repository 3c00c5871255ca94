"""Immutable records of an analysed trace, which reports and exporters read.

A use is a read of the storage by an operation. A moment is the serial number of the storage that is the
newest at that time.

The FREE event of a storage holds the type and the uses. If the storage is live when the trace ends, a USES
event holds the type and the uses. In other events, the same fields have another meaning.

Sizes are bytes, times are milliseconds, and ``None`` means unknown.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from memlog.trace.encoding import StreamEvent

UNKNOWN_TYPE: Final = 0
WIDE: Final = 1
"""Type of a storage: float32, both with autocast and without autocast."""
HALF: Final = 2
"""Type of a storage: float32 without autocast, bfloat16 under autocast."""
OTHER_TYPE: Final = 3
"""Type of a storage: any type except float32, float16 and bfloat16, for example int64 or float64."""
HALF_NOW: Final = 4
"""Type of a storage: bfloat16 or float16 in the traced step."""
HALF_BY_SLOW_CONVOLUTION: Final = 5
"""Type of a storage: `HALF`, and the result of a convolution that oneDNN cannot compute in bfloat16 on this
processor. torch then uses another kernel, with buffers that are several times larger than the input."""

_BITS: Final = 21
_MAX_MOMENT: Final = (1 << _BITS) - 1
MOST_CASTS: Final = 255
"""Maximum of `Uses.casts`. An event stores this number in one byte."""


class Uses(NamedTuple):
    """Type and uses of one storage."""

    type: int
    casts: int
    """Number of reads by matrix products and convolutions in the forward pass. Only reads of `WIDE` storages
    are counted, because autocast casts no other storages."""
    cast_first: int
    """Moment of the first read by a matrix product or convolution, in the forward or the backward pass.
    0: there was no such read, or the storage is not `WIDE`."""
    cast_last: int
    """Moment of the last read by a matrix product or convolution; see `cast_first`."""
    used: int
    """Moment of the last read by any operation except matrix products and convolutions; 0: never."""
    backward_layer: int
    """Number of the first layer whose backward pass read the storage; 0: unknown."""


NOTHING_KNOWN: Final = Uses(UNKNOWN_TYPE, 0, 0, 0, 0, 0)


def packed(cast_first: int, cast_last: int, used: int) -> int:
    """Pack three moments into one 64-bit number."""
    first, last, other = (min(moment, _MAX_MOMENT) for moment in (cast_first, cast_last, used))
    return first << 2 * _BITS | last << _BITS | other


def uses_of(event: StreamEvent) -> Uses:
    """Return the uses that a FREE or USES event holds."""
    first, last, other = (event.size >> shift & _MAX_MOMENT for shift in (2 * _BITS, _BITS, 0))
    return Uses(event.phase, event.thread, first, last, other, event.layer)


EngineName: TypeAlias = Literal["native", "dispatch", "sampler"]
"""Engine that records a trace.

``native``: reads the device allocator's own history. ``dispatch``: records the results of every operation on
the CPU. ``sampler``: reads the allocator's statistics when modules begin and end."""

EngineChoice: TypeAlias = Literal["auto", "native", "dispatch", "sampler"]
"""The engine that a user selects; ``auto``: the best one for the device."""

Exactness: TypeAlias = Literal["exact", "lower bound", "approximate", "sampled", "none"]
"""Exactness of a trace's bytes.

- ``exact``: every allocation is known.
- ``lower bound``: allocations inside some operations or inside compiled code are unknown. ``unseen`` lists
  these operations. All other allocations are known.
- ``approximate``: tracing changed the allocations of operations (``unseen`` lists the changes). So the peak
  of an untraced step can be lower or higher.
- ``sampled``: memory was read at some moments only, so a peak between two readings is missed. Each known peak
  is a lower bound.
- ``none``: bytes are unknown. Only calls and times are known."""


_MODELS = 3
"""Maximum number of models that a title names."""


class PhaseFigures(msgspec.Struct, frozen=True):
    """Figures of one layer in one phase, over the whole trace."""

    phase: str
    """``forward``, ``backward``, ``recompute`` or ``optimizer``."""
    calls: int
    """Number of calls of the layer's ``forward``. In the backward pass: number of uninterrupted sequences of
    the layer's operations."""
    allocations: int | None
    """Number of allocations by the layer itself. ``allocations``, ``allocated`` and ``frees`` are ``None`` if
    the engine is ``sampler``."""
    allocated: int | None
    """Bytes that the layer itself allocated. Allocations by the layer's children do not count."""
    frees: int | None
    """Number of allocations by the layer itself that were freed before the trace ended."""
    peak: int | None
    """Highest number of live bytes in the whole process while the layer or a child was active."""
    kept: int | None
    """Live bytes at the end of a call of the layer minus live bytes at the call's beginning, summed over all
    calls. Bytes of children are included. ``None`` if bytes are unknown."""
    time_ms: float
    """Time of the layer's calls, from beginning to end, summed over all calls. The time of children and the
    cost of tracing are included."""


class LayerFigures(msgspec.Struct, frozen=True):
    """Figures of one module."""

    path: str
    """Path of the module; for the model itself, the name of its class."""
    phases: tuple[PhaseFigures, ...]
    allocated: int | None
    """Bytes that the layer itself allocated in all phases; ``None`` if the engine is ``sampler``, which sees
    no allocations."""
    peak: int | None
    """Highest number of live bytes while the layer or a child was active, in any phase."""
    at_peak: int | None
    """Bytes of the layer itself that were live at the trace's peak; ``None`` if the engine is ``sampler``."""
    at_peak_total: int | None
    """Bytes of the layer and of its children that were live at the trace's peak; ``None`` if the engine is
    ``sampler``."""
    time_ms: float
    """Time in all phases."""
    reserved_peak: int | None = None
    """Highest number of bytes that the caching allocator had reserved when a call of the layer began or
    ended."""
    fragmentation: float | None = None
    """Mean of ``(reserved - allocated) / reserved`` at the beginnings and ends of the layer's calls."""
    added: int | None = None
    """Largest rise of the live bytes during one call of the layer's ``forward``, or during one uninterrupted
    part of the layer's backward pass. Allocations by children are included. ``None`` if bytes are unknown,
    and for work outside all modules."""

    def phase(self, name: str) -> PhaseFigures | None:
        """Return the figures of one phase; ``None`` if the layer was not active in this phase."""
        return next((figures for figures in self.phases if figures.phase == name), None)


class Share(msgspec.Struct, frozen=True):
    """Live bytes at the peak, for one layer, phase, category and line."""

    path: str
    phase: str
    """Phase in which the bytes were allocated; ``before``: before the trace."""
    category: str
    size: int
    line: str = ""
    """Program line that allocated the bytes. In the backward pass: the line that called the forward
    operation. Empty if the line is unknown, or if a module allocated the bytes."""

    @property
    def holder(self) -> str:
        return self.line or self.path


class LineFigures(msgspec.Struct, frozen=True):
    """Bytes that one line of the program allocated outside all modules."""

    line: str
    """File, line number, function, and the called function of torch or of another package. For example:
    ``train.py:42 in step: cross_entropy``."""
    allocated: int
    """Bytes that the operations of the line allocated, including in the backward pass."""
    at_peak: int
    """Bytes of ``allocated`` that were live at the peak."""


class Fragmentation(msgspec.Struct, frozen=True):
    """Bytes that a caching allocator reserves but no tensor uses."""

    reserved: int
    allocated: int
    inactive_split: int | None
    """Free bytes in segments that are partly in use; ``None`` if the allocator's blocks are unknown."""
    ratio: float
    """``(reserved - allocated - unused_in_pools) / reserved``, 0 to 1."""
    source: Literal["blocks", "statistics"]
    unused_in_pools: int = 0
    """Free bytes in private pools. A captured CUDA graph works in them when it is replayed, so they are not
    fragmentation. 0 if the allocator's blocks are unknown."""


class TraceResult(msgspec.Struct, frozen=True):
    """Result of analysing a trace. Its size depends on the number of modules, not on the number of events."""

    engine: EngineName
    why: str
    """Reason why memlog chose this engine."""
    device: str
    exactness: Exactness
    started_us: int
    """Start of the trace, Unix time in microseconds."""
    duration_ms: float
    before: int | None
    """Known bytes that were live when the trace began. ``unseen`` lists the memory that is not known."""
    peak: int | None
    """Highest number of live bytes, including the bytes from before the trace."""
    peak_ms: float | None
    """Time from the start of the trace to the peak."""
    end: int | None
    """Bytes live when the trace ended."""
    categories: dict[str, int]
    """Bytes live at the peak, by category."""
    shares: tuple[Share, ...]
    """Bytes live at the peak, by layer, phase, category and line, largest first. They sum to ``peak``."""
    layers: tuple[LayerFigures, ...]
    """Layers in the order in which they first appear in the model."""
    attributed: float | None
    """Bytes that modules allocated, as a fraction of all bytes allocated in forward and backward passes."""
    unattributed: dict[str, int]
    """Bytes allocated outside all modules, by phase; empty if the engine is ``sampler``."""
    fragmentation: Fragmentation | None
    fragmentation_reason: str | None
    """Reason why ``fragmentation`` is ``None``."""
    events: int
    """Number of events that were recorded."""
    kept_events: int
    """Number of events that are stored one by one. The totals count all events."""
    truncated: bool
    """True if the trace has more events than ``max_events``. Totals and peaks include all events."""
    dropped: dict[str, int]
    """Reasons why the totals are incomplete, each with the number of cases (such as events or modules)."""
    unseen: tuple[str, ...]
    """Whole sentences. Each describes memory or events that the engine can't see."""
    lines: tuple[LineFigures, ...] = ()
    """Lines of the program that allocated outside all modules, sorted by bytes at the peak, largest first;
    empty if unknown."""

    def _repr_html_(self) -> str:
        from memlog.trace.summary import result_html  # noqa: PLC0415 - only notebooks need it

        return result_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's interface
        """Print the summary, not every figure, in IPython and in the text output of a notebook."""
        from memlog.trace.summary import summary_text  # noqa: PLC0415 - only notebooks need it

        printer.text(summary_text(self))


class RecordedTrace(msgspec.Struct, frozen=True):
    """Result and stored events of a trace."""

    result: TraceResult
    paths: tuple[str, ...]
    """Paths of the layers; the index is the layer's number in the events."""
    events: bytes
    """The first ``result.kept_events`` events, encoded as `memlog.trace.encoding` describes."""
    kinds: tuple[str, ...] = ()
    """Class names of the layers, with the same index as in ``paths``."""
    optimizers: tuple[str, ...] = ()
    """Class name of the optimizer in each optimizer step, in order."""
    lines: tuple[str, ...] = ()
    """Lines of the program. Events number these lines from 1."""

    @property
    def model(self) -> str:
        """Name of the model; if the step calls several models, their names; empty if it calls none."""
        first = self.paths[1] if len(self.paths) > 1 else ""
        if not first.startswith("("):
            return first
        roots = [path for path in self.paths[1:] if path.startswith("(") and path.endswith(")")]
        return ", ".join(roots[:_MODELS]) + ", …" * (len(roots) > _MODELS)
