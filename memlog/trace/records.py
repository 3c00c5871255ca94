"""What a trace came to: immutable records, which everything after the analysis works with.

Sizes are bytes, times milliseconds, and ``None`` is unknown.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

EngineName: TypeAlias = Literal["native", "dispatch", "sampler"]
"""``native``: the device allocator's own history. ``dispatch``: every operation's results on the CPU.
``sampler``: the allocator's statistics, read as modules begin and end."""

EngineChoice: TypeAlias = Literal["auto", "native", "dispatch", "sampler"]
"""What may be asked for; ``auto``: the best for the device."""

Exactness: TypeAlias = Literal["exact", "lower bound", "approximate", "sampled", "none"]
"""``exact``: every allocation is known. ``lower bound``: every one but those inside of some operations or of
compiled code, as ``unseen`` says. ``approximate``: tracing changed what operations allocate, as ``unseen``
says, so that the peak of an untraced step may be lower or higher. ``sampled``: a peak between two readings is
missed, so each is a lower bound. ``none``: nobody can tell bytes here, only calls and times."""


class PhaseFigures(msgspec.Struct, frozen=True):
    """One layer in one phase, over the whole trace."""

    phase: str
    """``forward``, ``backward``, ``recompute`` or ``optimizer``."""
    calls: int
    """Calls of its ``forward``; in the backward pass: stretches of operations that belong to it."""
    allocations: int | None
    """How many it made itself; this and what follows of them is ``None`` where the sampler ran."""
    allocated: int | None
    """Bytes that it allocated itself, its children not counted."""
    frees: int | None
    """How many of these were freed before the trace ended."""
    peak: int | None
    """Most bytes live, the whole process's, while it or a child was active."""
    kept: int | None
    """Bytes live at its exits over those at its entries, summed over its calls; children included. ``None``
    where nobody can tell bytes."""
    time_ms: float
    """From entry to exit, children included, and the cost of tracing too."""


class LayerFigures(msgspec.Struct, frozen=True):
    """One module, by its path; the path of the model itself is the name of its class."""

    path: str
    phases: tuple[PhaseFigures, ...]
    allocated: int | None
    """Bytes that it allocated itself in all phases; ``None`` where the sampler ran, which sees none."""
    peak: int | None
    """Most bytes live while it or a child was active, in any phase."""
    at_peak: int | None
    """Its own part of the bytes live at the global peak; ``None`` where the sampler ran."""
    at_peak_total: int | None
    """The same with its children's."""
    time_ms: float
    """Of all phases."""
    reserved_peak: int | None = None
    """Most bytes that the caching allocator held at its entries and exits."""
    fragmentation: float | None = None
    """Mean of ``(reserved - allocated) / reserved`` at its entries and exits."""

    def phase(self, name: str) -> PhaseFigures | None:
        """Its figures in one phase; ``None`` where it was not active in it."""
        return next((figures for figures in self.phases if figures.phase == name), None)


class Share(msgspec.Struct, frozen=True):
    """A part of what was live at the peak."""

    path: str
    phase: str
    """In which it was allocated; ``before``: before the trace."""
    category: str
    size: int
    line: str = ""
    """The line of the program that made it, if no module did; in the backward pass the line whose derivative
    it is. Empty if unknown."""

    @property
    def holder(self) -> str:
        """The layer, or the line that made it outside all modules."""
        return self.line or self.path


class LineFigures(msgspec.Struct, frozen=True):
    """A line of the program that allocated something in no module."""

    line: str
    """``train.py:42 in step: cross_entropy``: its file, number and function, and what it calls of torch's."""
    allocated: int
    """Bytes, its part of the backward pass included."""
    at_peak: int
    """Bytes of them that were live at the peak."""


class Fragmentation(msgspec.Struct, frozen=True):
    """How much of what an allocator holds is of no use to anybody else."""

    reserved: int
    allocated: int
    inactive_split: int | None
    """Free bytes in segments that are partly in use; ``None`` without the allocator's blocks."""
    ratio: float
    """``(reserved - allocated) / reserved``, as the seed document defines it."""
    source: Literal["blocks", "statistics"]


class TraceResult(msgspec.Struct, frozen=True):
    """A trace, analysed. Its size grows with the number of modules, never with the length of the trace."""

    engine: EngineName
    why: str
    """Why this engine ran."""
    device: str
    exactness: Exactness
    started_us: int
    """Unix time in microseconds."""
    duration_ms: float
    before: int | None
    """Bytes there when the trace began, as far as they are known; see ``unseen``."""
    peak: int | None
    """Most bytes live, those from before included."""
    peak_ms: float | None
    """When, since the trace began."""
    end: int | None
    """Bytes live when the trace ended."""
    categories: dict[str, int]
    """What was live at the peak."""
    shares: tuple[Share, ...]
    """The same by layer and phase, largest first; sums to ``peak``."""
    layers: tuple[LayerFigures, ...]
    """In the order in which they first appear in the model."""
    attributed: float | None
    """Part of the bytes of the forward and backward passes whose module is known, 0 to 1."""
    unattributed: dict[str, int]
    """Bytes allocated in no module, by phase; empty where the sampler ran."""
    fragmentation: Fragmentation | None
    fragmentation_reason: str | None
    """Why there is none."""
    events: int
    """Events recorded."""
    kept_events: int
    """Events that are there one by one; the others are in the totals alone."""
    truncated: bool
    """Whether ``max_events`` was reached. Totals and peaks hold all the same."""
    dropped: dict[str, int]
    """What is missing from the totals, counted by reason."""
    unseen: tuple[str, ...]
    """What this engine can't see, in whole sentences."""
    lines: tuple[LineFigures, ...] = ()
    """What no module allocated, by the line that did, the largest at the peak first; empty: unknown."""


class Trace(msgspec.Struct, frozen=True):
    """A result together with the events that it was made from: what exporters take."""

    result: TraceResult
    paths: tuple[str, ...]
    """Layers by their numbers in the events."""
    events: bytes
    """Encoded as `memlog.trace.encoding` says; the first ``result.kept_events``."""
    kinds: tuple[str, ...] = ()
    """The names of the layers' classes, by the same numbers; empty in a trace of an older memlog."""
    optimizers: tuple[str, ...] = ()
    """The names of the optimizers' classes, one for each step that was made, in order; empty likewise."""
    lines: tuple[str, ...] = ()
    """Lines of the program by their numbers in the events, which begin with 1."""
