"""Findings about growing series whose precise cause is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from msgspec.structs import replace

from memlog._internal.units import format_bytes
from memlog.events import ALLOCATED, HOST_ANON, SHARED, Event, Finding, now_us
from memlog.facts.allocator_retries import against_fragmentation
from memlog.facts.detector import CHILD, CHILDREN_SHARED, FREE_LISTS, PILE
from memlog.facts.device_series import FRAGMENTED, OF_DEVICES, PRIVATE_POOLS
from memlog.growth.suspicion import Suspicion

_SURE = 100
"""If growth has lasted fewer steps than this, the confidence that memory grows is at most medium."""
_NARROW = 1 / 3
"""Fraction of the rate. If half the width of the rate's 95 % interval is larger, the confidence that memory
grows is at most medium."""
_FRAGMENTS = 400
"""If growth of an allocator's unused memory, or of private pools, has lasted fewer steps than this, memlog
does not report it."""


class _Text(NamedTuple):
    kind: str
    what: str
    """Name of the memory that grows: the beginning of the title."""
    evidence: str
    """Description of how the memory was measured."""
    remedy: str


_TEXTS = {
    HOST_ANON: _Text(
        "growth",
        "The process's memory",
        "Anonymous memory (RssAnon) at step ends, which excludes mapped files and shared memory",
        "Look for what a step keeps: losses or outputs in lists without .detach(), caches, hooks.",
    ),
    FREE_LISTS: _Text(
        "allocator_free_lists",
        "Unused memory of the C library's allocator",
        "Most of the growth is memory that the program has freed and malloc keeps (mallinfo2)",
        "Set MALLOC_ARENA_MAX=2 or MALLOC_TRIM_THRESHOLD_=131072, or preload jemalloc.",
    ),
    SHARED: _Text(
        "shared_memory",
        "Shared memory",
        "Shared memory that the training process maps, at step ends",
        "Copy what you keep of a DataLoader's batches (tensor.clone()), and close shared memory after use.",
    ),
    CHILDREN_SHARED: _Text(
        "shared_memory",
        "Shared memory of child processes",
        "Shared memory that the training's child processes map, as the helper process samples it",
        "Close shared memory after use, and limit what waits in queues between processes.",
    ),
    CHILD: _Text(
        "worker_process",
        "The memory of {}",
        "Anonymous memory of each process, without pages that it shares",
        "Look for what the dataset or collate function keeps from item to item in this process.",
    ),
    PILE: _Text(
        "worker_process",
        "The memory of child processes ({})",
        "Memory that each child process of this kind has alone (Private_Dirty), summed",
        "End each process that you start and wait for it (Popen.communicate, Process.join), or keep a pool.",
    ),
    ALLOCATED: _Text(
        "growth",
        "Memory that tensors hold on {}",
        "Bytes that the allocator has given out, at step ends",
        "Look for tensors that a step keeps: losses, outputs or gradients in lists, without .detach().",
    ),
    FRAGMENTED: _Text(
        "device_fragmentation",
        "Fragmented memory of {}",
        "Bytes that the allocator reserves beyond the most that tensors ever held at a time, without "
        "private pools, at step ends. Free blocks of other sizes did not fit. If the device is full, the "
        "allocator has to give them back first, and a step can run out of memory although tensors need less",
        "",
    ),
    PRIVATE_POOLS: _Text(
        "graph_pools",
        "Memory in private pools of {}",
        "Bytes that the allocator reserves for CUDA graphs and torch.cuda.MemPool alone, at step ends",
        "Capture each graph one time and replay it, drop graphs that you don't replay any more, or let "
        "graphs share a pool (torch.cuda.graph(…, pool=first.pool())).",
    ),
}


class GrowthFindings:
    """Receiver of confirmed growth. It publishes a finding about each growth that is certain enough."""

    def __init__(self, publish: Callable[[Event], object]) -> None:
        self._publish = publish
        self._fragmented: set[str] = set()

    def __call__(self, growth: Suspicion, *, compiles: bool = False) -> None:
        """Publish a finding about a growth, unless the growth is too uncertain.

        If ``compiles`` is true, torch's compiler is in use, and tensors were not watched for this reason.

        For growth of the training process, the confidence must be high.

        Growth of an allocator's unused memory, or of private pools, is published one time, and only after
        `_FRAGMENTS` steps. Even in healthy programs, small free pieces of the heap add up for a while.
        """
        if growth.series == FREE_LISTS or growth.series.endswith((FRAGMENTED, PRIVATE_POOLS)):
            known = growth.series in self._fragmented
            if known or growth.step - growth.since_step < _FRAGMENTS:
                return
            self._fragmented.add(growth.series)
        # Even in healthy programs, allocators take more memory for a while.
        if growth.series != HOST_ANON or confidence_in(growth) == "high":
            found = finding_of(growth)
            self._publish(_of_compiled_code(found) if compiles else found)


def _of_compiled_code(finding: Finding) -> Finding:
    return replace(
        finding,
        evidence=(
            *finding.evidence,
            "Tensors that compiled code (torch.compile) makes were not watched.",
        ),
        remedy="Run some steps with TORCH_COMPILE_DISABLE=1: memlog can then watch the tensors and name what "
        f"keeps them. {finding.remedy}",
    )


def finding_of(growth: Suspicion) -> Finding:
    """Return a finding that reports the growth of a series and names no cause."""
    text, where = _text_of(growth.series)
    others = f", and of {growth.others} more like it," if growth.others else ""
    title = f"{text.what.format(where)}{others} grows"
    if growth.processes is not None:
        begun = f"{growth.processes} child processes ({where}) were started and have not ended"
        title = f"{begun}: their memory grows"
    remedy, forecast, limit = text.remedy, growth.forecast, growth.limit
    if where is not None and growth.series.endswith(FRAGMENTED):
        # Memory does not run out at the forecast step: the allocator can still free its cache then.
        remedy, forecast, limit = against_fragmentation(where, growth.allocator), None, None
    return Finding(
        time_us=now_us(),
        step=growth.step,
        kind=text.kind,
        title=title,
        where=where,
        since_step=growth.since_step,
        rate=growth.rate,
        forecast=forecast,
        limit=limit,
        evidence=(
            text.evidence + ".",
            f"It grew throughout steps {growth.since_step} to {growth.step} and reached "
            f"{format_bytes(growth.level)}.{_interval(growth)}",
        ),
        confidence=confidence_in(growth),
        remedy=remedy,
        memory=memory_in(growth.series),
    )


def _interval(growth: Suspicion) -> str:
    if growth.rate_low <= 0:  # an early sign, which no test has judged
        return ""
    return (
        f" It grew by {format_bytes(growth.rate_low)} to {format_bytes(growth.rate_high)} per step "
        "(95 % confidence)."
    )


def memory_in(series: str) -> str | None:
    """Return ``host`` or the device whose memory a series is; ``None`` for memory of other processes."""
    if series in (HOST_ANON, FREE_LISTS):
        return "host"
    return next((series.removesuffix(end) for end in OF_DEVICES if series.endswith(end)), None)


def _text_of(series: str) -> tuple[_Text, str | None]:
    """Return the texts for a series, and its child process, kind of child processes, or device.

    The second value is ``None`` if the series' name contains none of these.
    """
    if series.startswith(CHILD):
        return _TEXTS[CHILD], series.removeprefix(CHILD)
    if series.startswith(PILE):
        return _TEXTS[PILE], series.removeprefix(PILE)
    for ending in OF_DEVICES:
        if series.endswith(ending):
            return _TEXTS[ending], series.removesuffix(ending)
    return _TEXTS[series], None


def confidence_in(growth: Suspicion) -> Literal["high", "medium", "low"]:
    """Return the confidence that memory grows.

    The confidence depends on the growth's number of steps, and on the width of the rate's 95 % interval.
    """
    long = growth.step - growth.since_step >= _SURE
    narrow = growth.rate_high - growth.rate_low <= 2 * _NARROW * growth.rate
    if long and narrow:
        return "high"
    return "medium" if long or narrow else "low"
