"""Causes of growth beside holders.

They are the C library's allocator, lines that make Python objects, garbage, parameters and optimizer state in
traced steps, and tensors that each iteration replaces by a larger one.

``tracemalloc`` makes Python's allocations two to four times as slow, and a program that hardly does anything
else more than ten times. So memlog starts it only if memlog has found no other cause of the growth. memlog
stops it if its traces exceed `_MOST_TRACED` bytes, or if steps take too long.

Garbage can look like growth of the training process, or of the memory that tensors hold on a device. So all
garbage is collected before the detector suspects such growth, and again before it confirms such growth. After
the last step, garbage is collected only for growth that has not passed such a collection: by then, the
program's functions have returned, and a collection would also free what they held.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import threading
import time
import tracemalloc
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from time import monotonic, thread_time
from typing import Final, NamedTuple

from memlog._internal import processes
from memlog._internal.inert_access import is_kind
from memlog._internal.terminal import MIB, format_bytes
from memlog.events import ALLOCATED, HOST_ANON, SHARED, Trace
from memlog.growth.series import Suspicion
from memlog.leaks.assignment_lines import replaced, shown
from memlog.leaks.holders import Holder
from memlog.leaks.process_objects import MEMLOG, TimeBudget, seconds_allowed
from memlog.leaks.watched_storages import Site, WatchedStorage
from memlog.probes.process import (
    Heap,
    collect_garbage,
    device_in_use,
    heap_in_use,
    read_heap,
    read_sqlite_bytes,
)
from memlog.tracer.module_stack import CallingLines

_COUNT_SECONDS: Final = 0.3
"""Maximum processor seconds for adding up the sizes of all tensors. If it takes longer, the sum is
unknown."""
_PART: Final = 0.25
"""If tensors hold more than this fraction of the growth, no cause outside Python is named."""
_FROM_MALLOC: Final = ("kept_graph", "kept_tensors", "forward_without_backward")
"""Kinds of holders whose objects are allocated between those of each step."""
_FOR_SMALL: Final = (
    "Remove old elements, keep only numbers (`.item()`), or copy the elements into one large tensor "
    "that is made in advance. `.detach()` alone leaves a small tensor in its place."
)
_FOR_SLOTS: Final = (
    "Keep the elements in one tensor that is made at the start, "
    "or set `MALLOC_TRIM_THRESHOLD_=131072`."
)
EXPLAINED: Final = 0.5
"""A cause is named only if it explains at least this fraction of the growth."""


class Figures(NamedTuple):
    """Memory of this process at one moment."""

    step: int
    heap: Heap | None
    tensors: int | None
    """Bytes of all tensors that have a Python object."""
    sqlite: int


def figures(step: int) -> Figures:
    tensors: int | None = 0
    if "torch" in sys.modules:
        from memlog.leaks.live_tensors import tensor_bytes  # noqa: PLC0415
        from memlog.leaks.process_objects import objects_of  # noqa: PLC0415 - they load parts of torch

        budget = TimeBudget(_COUNT_SECONDS)
        with budget.running():
            tensors = tensor_bytes(objects_of(sys.modules["torch"].Tensor), budget)
    return Figures(step, read_heap(), tensors, read_sqlite_bytes())


def cause_by_elimination(
    growth: Suspicion, before: Figures, explained: float, *, is_ending: bool
) -> Holder | None:
    """Return a cause outside Python objects if the allocator's figures show a cause; otherwise ``None``.

    Return ``None`` also if tensors hold the memory. If ``is_ending`` is true, the allocator's free memory is
    not considered, because the program can have freed this memory after the last step.
    """
    now = figures(growth.step)
    steps = now.step - before.step
    if (
        growth.series == SHARED
        or growth.series.endswith(ALLOCATED)
        or steps <= 0
        or before.heap is None
        or now.heap is None
    ):
        return None
    if before.tensors is None or now.tensors is None:
        return None
    if (now.tensors - before.tensors) / steps >= _PART * growth.rate:
        return None
    in_sqlite = (now.sqlite - before.sqlite) / steps
    if in_sqlite >= EXPLAINED * growth.rate:
        return _sqlite(in_sqlite)
    from memlog.torchside.internals import profiling  # noqa: PLC0415 - it needs torch, which is loaded

    return by_elimination(
        growth.rate,
        explained=explained,
        malloc_used=(now.heap.in_use - before.heap.in_use) / steps,
        malloc_free=0.0 if is_ending else (now.heap.idle - before.heap.idle) / steps,
        profiling=profiling(),
    )


def by_elimination(
    rate: float,
    *,
    explained: float,
    malloc_used: float,
    malloc_free: float,
    profiling: bool,
) -> Holder | None:
    """Return the cause that the figures of the C library's allocator show; ``None`` if they show none.

    Args:
        rate: Growth in bytes per step.
        explained: Bytes per step that Python objects explain.
        malloc_used: Growth per step of the bytes that the C library's allocator has given out.
        malloc_free: Growth per step of the free bytes that the C library's allocator keeps.
        profiling: True if torch's profiler records. The profiler keeps its events in C++ until it is stopped.
    """
    least = EXPLAINED * rate
    if explained >= least:
        return None
    if malloc_free >= least:
        return _free_lists(malloc_free)
    if malloc_used - explained >= least:
        return _native(malloc_used - explained, explained, profiling=profiling)
    return None


def between_free_memory(holders: Sequence[Holder]) -> list[Holder]:
    """Return the holder of tensors or graphs that keep the allocator from giving back its free memory.

    Small objects that a program keeps lie between the larger ones that each step frees.
    """
    holder = next((candidate for candidate in holders if candidate.kind in _FROM_MALLOC), None)
    if holder is None:
        return []
    return [
        holder._replace(
            title=f"{holder.title} The C library's allocator can't give back the free memory between.",
            evidence=(*holder.evidence, "most of the growth is memory that steps free"),
            confidence="medium",
            remedy=_for_elements(holder),
        )
    ]


def _for_elements(holder: Holder) -> str | None:
    if holder.is_chain:
        return holder.remedy
    return _FOR_SMALL if holder.bytes_left is None else _FOR_SLOTS


def _free_lists(rate: float) -> Holder:
    return Holder(
        "allocator_free_lists",
        f"The C library's allocator keeps {format_bytes(rate)} more of free memory per step.",
        None,
        rate,
        ("what the program uses does not grow; what the allocator keeps free does",),
        "medium",
        "Set `MALLOC_ARENA_MAX=2` or `MALLOC_TRIM_THRESHOLD_=131072`, or use jemalloc.",
    )


def _sqlite(rate: float) -> Holder:
    from memlog.leaks.owner_chain import OwnerSearch  # noqa: PLC0415
    from memlog.leaks.owner_text import describe  # noqa: PLC0415
    from memlog.leaks.process_objects import all_objects  # noqa: PLC0415 - they load parts of torch

    kind = sys.modules["sqlite3"].Connection
    connections = [value for value in all_objects() if is_kind(value, kind)]
    budget = TimeBudget(_COUNT_SECONDS)
    with budget.running():
        chains = OwnerSearch(budget, [connections]).chains(connections)
    owners = [describe(chain, frozenset()) for chain in chains if chain is not None]
    names = [f"`{owner.expression}{owner.contents}` {owner.place}".rstrip() for owner in owners]
    # With several connections, it is unknown which of them keeps the memory.
    of = f" ({names[0]})" if len(connections) == len(names) == 1 else ""
    return Holder(
        "native_library",
        f"SQLite keeps {format_bytes(rate)} more per step in memory{of}, as a database in `:memory:` does.",
        None,
        rate,
        ("the bytes that SQLite's library has allocated grow",),
        "high",
        "Delete rows that are no longer needed, or keep the database in a file.",
    )


def _native(rate: float, explained: float, *, profiling: bool) -> Holder:
    title = f"A C or C++ library allocates {format_bytes(rate)} per step and does not free it."
    remedy = "Run some steps with `heaptrack python …` or `memray run --native` to see the caller."
    if profiling:
        title = f"torch's profiler is on: it keeps {format_bytes(rate)} of events per step."
        remedy = "Stop the profiler, or give it a `schedule` that ends (`torch.profiler.schedule`)."
    return Holder(
        "native_library",
        title,
        None,
        rate,
        (
            f"memory from malloc grows by {format_bytes(rate + explained)} per step",
            f"Python objects and tensors explain {format_bytes(explained)} of it",
        ),
        "medium",
        remedy,
    )


_FRAMES: Final = 8
"""Number of frames that ``tracemalloc`` stores for each allocation. The program's line is usually among
them."""
_LEAST: Final = 64.0
"""Bytes per step. A line whose memory grows less is not reported."""
_MOST_TRACED: Final = 6 * MIB
"""Maximum bytes that ``tracemalloc`` itself uses at the end of a step. If it uses more, the trace ends. This
maximum is enough for about 30,000 allocations. To read them takes 0.5 s."""
_MOST_IN_STEP: Final = 64 * MIB
"""Maximum bytes that ``tracemalloc`` itself uses within a step. If it uses more, the trace ends within the
step."""
_LOOK: Final = 0.02
"""Seconds between two checks of the memory that ``tracemalloc`` itself uses."""


class _Line(NamedTuple):
    file: str
    line: int


class AllocationTrace:
    """Trace of Python's allocations over some steps.

    The bytes that each line holds are counted half-way and at the end. A line grows if it holds more bytes at
    the end.

    ``step_seconds`` is the usual processor time of a step. If the steps together take ``seconds`` more than
    that, the trace ends, also within a step.
    """

    def __init__(self, step_seconds: float = math.inf, seconds: float = math.inf) -> None:
        self._step_seconds, self._seconds = step_seconds, seconds
        self._began = 0.0
        self._steps = 1
        self._started = False
        self._middle: dict[_Line, int] = {}
        self._lines = CallingLines()
        self._start = tracemalloc.start

    def start(self) -> bool:
        """Start tracing, and return True. If the program itself uses ``tracemalloc``, return False."""
        if not tracemalloc.is_tracing():
            tracemalloc.start(_FRAMES)
            self._started = True
            self._began = time.process_time()
            self._start, tracemalloc.start = tracemalloc.start, self._program_starts
            # Without this line, a forked child, such as a DataLoader's worker, would trace until it ends.
            processes.renew(self, "_started", functools.partial(_stop_in_child, weakref.ref(self)))
            # Without this thread, the traces of a step that reads a large file could take as much memory as
            # the file's content.
            threading.Thread(target=self._limit, name="memlog-tracing", daemon=True).start()
        return self._started

    @property
    def running(self) -> bool:
        """True while the trace runs and uses at most `_MOST_TRACED` bytes.

        The trace stops running if the program itself starts or stops tracing.
        """
        tracing = self._started and tracemalloc.is_tracing()
        return tracing and tracemalloc.get_tracemalloc_memory() <= _MOST_TRACED

    def step_ended(self) -> None:
        """Allow the time of another step."""
        self._steps += 1

    @property
    def slower_by(self) -> float:
        """Processor seconds that the steps so far took longer than usual."""
        return time.process_time() - self._began - self._steps * self._step_seconds

    def _limit(self) -> None:
        while (
            self._started
            and tracemalloc.get_tracemalloc_memory() <= _MOST_IN_STEP
            and self.slower_by <= self._seconds
        ):
            time.sleep(_LOOK)
        self.stop()

    def _program_starts(self, nframe: int = 1) -> None:
        """Stop memlog's trace, and start the trace that the program asks for.

        If memlog's trace went on, `stop` would later end the program's trace, too.
        """
        self.stop()
        self._start(nframe)

    def mark_middle(self) -> None:
        """Count the bytes that each line holds. Call this method half-way through the trace."""
        if self._started:
            began = time.process_time()
            self._middle = self._held()
            # The search's own time is not that of slow steps.
            self._began += time.process_time() - began

    def finish(self, steps: int) -> list[Holder]:
        """Stop tracing. Return the lines that hold more bytes than at `mark_middle`, ``steps`` steps ago.

        The line whose memory grows fastest comes first.
        """
        if not self._started:
            return []
        held = self._held()
        self.stop()
        rates = {
            line: min((size - self._middle[line]) / steps, size / steps)
            for line, size in held.items()
            if line in self._middle and size > self._middle[line]
        }
        largest = sorted(rates, key=lambda line: -rates[line])[:3]
        return [_holder(line, rates[line]) for line in largest if rates[line] >= _LEAST]

    def stop(self) -> None:
        """Stop tracing, if this object started it. A second call is harmless."""
        if self._started:
            self._started = False
            # `==`: each access makes a new bound method. A `start` that other code has set since stays.
            if tracemalloc.start == self._program_starts:
                tracemalloc.start = self._start
            tracemalloc.stop()

    def _held(self) -> dict[_Line, int]:
        held: defaultdict[_Line, int] = defaultdict(int)
        # Grouped by traceback first, because each traceback can have thousands of allocations.
        for group in tracemalloc.take_snapshot().statistics("traceback"):
            line = self._program_line(group.traceback)
            if line is not None:
                held[line] += group.size
        return dict(held)

    def _program_line(self, traceback: tracemalloc.Traceback) -> _Line | None:
        """Return the program's innermost line in a traceback; ``None`` if memlog is in the traceback.

        If the program is not in the traceback, return the traceback's innermost line.
        """
        # `tracemalloc` has the outermost frame first.
        frames = [frame for frame in reversed(traceback) if not frame.filename.startswith(MEMLOG)]
        if not frames or len(frames) < len(traceback):
            return None
        program = (frame for frame in frames if self._lines.is_program(frame.filename))
        frame = next(program, frames[0])
        return _Line(frame.filename, frame.lineno)


def _stop_in_child(trace: weakref.ref[AllocationTrace]) -> bool:
    """Stop the copy of a trace in a forked child. Return the copy's new ``_started``, which is False."""
    copied = trace()
    if copied is not None:
        copied.stop()
    return False


def _holder(line: _Line, rate: float) -> Holder:
    place, size = shown(line.file, line.line), format_bytes(rate)
    name = replaced(line.file, line.line)
    title = f"Python objects made at {place} take {size} more per step."
    remedy = "Look for what keeps the objects that this line makes."
    if name:
        title = f"`{name}` ({place}) is replaced by a larger value in each step, which takes {size} more."
        remedy = "Limit its length, or write the older part to a file."
    return Holder(
        "python_memory",
        title,
        place,
        rate,
        ("tracemalloc: allocated there, and not freed some steps later",),
        "medium",
        remedy,
    )


_COLLECTING = 2.0
"""Maximum processor seconds of the detector's garbage collections; in a long run, 1 % of the run's time.
Beyond the maximum, the detector collects only young garbage, which has not survived two collections yet."""
_BEFORE_SUSPICION = 0.5
"""Fraction of `_COLLECTING`. Beyond it, the collections before a suspicion are only of young garbage. The
rest of the time is for the collections before a confirmation."""


class _Collected(NamedTuple):
    """Step of the last garbage collection, and bytes in use after the collection."""

    step: int
    left: int


class TrainersMemory:
    """Garbage of this process."""

    def __init__(self) -> None:
        self._collected: dict[str, _Collected] = {}
        """For each series, the newest collection that explained a growth of the series."""
        self._collected_all: set[str] = set()
        """Series whose newest collection was one of all garbage."""
        self._collecting = 0.0
        self._begun = monotonic()

    def is_garbage(
        self, growth: Suspicion, *, is_confirmed: bool, has_ended: bool, is_early: bool = False
    ) -> bool:
        """Collect garbage. Return True if the garbage explains the growth.

        The growth is that of this process, or of the memory that tensors hold on a device. ``is_confirmed``
        is true if the growth has lasted, and false if it is only suspected so far. ``has_ended`` is true
        after the last step, for growth that was suspected before.

        Garbage can hide a leak. If the bytes left after collections grow at least half as fast as ``growth``,
        return False. Old garbage is collected, too, while time is left (`_COLLECTING`), unless ``is_early``.
        """
        series = growth.series if growth.series.endswith(ALLOCATED) else HOST_ANON
        if has_ended and series in self._collected_all:
            return False
        share = 1.0 if is_confirmed else _BEFORE_SUSPICION
        old = not is_early and self._collecting < share * seconds_allowed(_COLLECTING, self._begun)
        (self._collected_all.add if old else self._collected_all.discard)(series)
        began = thread_time()
        device = series.removesuffix(ALLOCATED)
        in_use = heap_in_use if device == series else lambda: device_in_use(device)
        collected = collect_garbage(old=old, in_use=in_use)
        self._collecting += thread_time() - began
        if collected is None or not collected.explains(growth.rise):
            return False
        before = self._collected.get(series)
        self._collected[series] = _Collected(growth.step, collected.left)
        if before is None or before.step >= growth.step:
            return True
        return (collected.left - before.left) / (growth.step - before.step) < growth.rate / 2


_LEAST_PART: Final = 0.5
"""If a category explains less than this part of the growth, it is not named."""
_REMEDIES: Final = {
    "parameters": "Look for layers or parameters that the program adds while it trains.",
    "buffers": "Look for a module that makes a buffer longer in its `forward()`, and limit its length.",
    "optimizer state": "Look for what the optimizer adds to its `state` in each step, and limit its length.",
}
"""Remedies by category of the tensors that stay from step to step."""


def cause_in_traces(traces: Sequence[Trace], growth: Suspicion) -> Holder | None:
    """Return the category that explains most of a growth; ``None`` if none does.

    ``traces`` are traced steps with exact figures, the oldest first. The first does not count, because the
    optimizer may have had no state yet.
    """
    device = "host" if growth.series == HOST_ANON else growth.series.removesuffix(ALLOCATED)
    if len(traces) < 3 or any(trace.device != device for trace in traces):  # noqa: PLR2004
        return None
    first, last = traces[1], traces[-1]
    steps = (last.step or 0) - (first.step or 0)
    gained = {name: last.at_peak.get(name, 0) - first.at_peak.get(name, 0) for name in _REMEDIES}
    category = max(gained, key=gained.__getitem__)
    if steps <= 0 or gained[category] < _LEAST_PART * growth.rate * steps:
        return None
    rate = gained[category] / steps
    before, after = (format_bytes(trace.at_peak.get(category, 0)) for trace in (first, last))
    verb = "grows" if category == "optimizer state" else "grow"
    return Holder(
        "kept_tensors",
        f"{category.capitalize()} {verb} by {format_bytes(rate)} per step.",
        None,
        rate,
        (f"exact in traced steps: {before} in step {first.step}, {after} in step {last.step}",),
        "high",
        _REMEDIES[category],
    )


_JOINS: Final = re.compile("cat|stack|append|pad")
"""Pattern in the names of operations that join tensors."""
_LEAST_ENDS: Final = 3
"""If fewer iterations than this were watched, no tensor counts as becoming larger."""
_EVEN: Final = 0.5
"""A tensor grows evenly if each rise of its size is at least this fraction of the mean rise."""


class SizesAtEnds:
    """Bytes of the newest storages made at each `Site`, recorded at the end of each watched iteration."""

    def __init__(self) -> None:
        self._ends: list[Counter[Site]] = []

    def add(self, storages: Iterable[WatchedStorage], iteration: int) -> None:
        """Record the bytes of each site's new storages at the end of an iteration.

        ``storages`` are the watched storages that are alive.
        """
        sizes: Counter[Site] = Counter()
        for storage in storages:
            if storage.iteration == iteration:
                sizes[storage.site] += storage.size
        self._ends.append(sizes)

    def holders(self) -> list[Holder]:
        """Return a `Holder` for each `Site` that joins tensors into a larger tensor in each iteration.

        Sites of other operations are left out. Their results are larger only because their inputs are larger.
        """
        if len(self._ends) < _LEAST_ENDS:
            return []
        joining = [site for site in self._ends[-1] if _JOINS.search(site.operation)]
        rates = {site: self._rate(site) for site in joining}
        return [_larger_tensor(site, rate) for site, rate in rates.items() if rate > 0]

    def _rate(self, site: Site) -> float:
        """Return the bytes per iteration by which a site's storages grow; 0 if they do not grow evenly."""
        rises = [after[site] - before[site] for before, after in pairwise(self._ends)]
        mean = fmean(rises)
        return mean if self._ends[0][site] and min(rises) >= _EVEN * mean else 0.0


def _larger_tensor(site: Site, rate: float) -> Holder:
    place, _, operation = site.line.partition(": ")
    where = place.partition(" ")[0] or None
    by = f" by `{operation}`" if operation else ""
    at = f" at {where}" if where else ""
    return Holder(
        "kept_tensors",
        f"The tensor made{at}{by} is larger in each step, by {format_bytes(rate)}",
        where,
        rate,
        (f"its size at the ends of iterations rises by {format_bytes(rate)} per step",),
        "medium",
        "Limit its length, or write the older part to a file.",
    )
