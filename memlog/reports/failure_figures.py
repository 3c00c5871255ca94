"""Figures of a failed allocation: the request, what was free, the limit, and who held the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memlog._internal.units import format_bytes
from memlog.events import OF_OTHERS, OTHER_PROCESSES, OutOfMemory, main_reading
from memlog.facts.oom_room import named, unused
from memlog.reports.advice import had_room
from memlog.reports.final_state import FinalState

_GREW = 0.05
"""Growth of other processes' memory is told from this share of the device on."""
_LEAST_OUTSIDE = 1024**3
"""The same in bytes, if the driver does not tell whose memory it is."""
_NAMED = 4
"""Maximum number of other processes that the report names."""


def room(failure: OutOfMemory) -> Iterator[str]:
    """Yield a table of the figures, and sentences on the limit and on who holds the memory."""
    sizes = {
        "requested": failure.requested,
        "free": failure.free,
        "in use": failure.allocated,
        "limit": failure.limit,
    }
    if failure.reserved is not None:
        sizes["held by the allocator"] = failure.reserved
    yield table(tuple(sizes), [tuple(format_bytes(size) for size in sizes.values())])
    if failure.limited_by:
        yield _verdict(failure)
    yield from _device(failure)
    if failure.free_after is not None:
        # A limit on the address space counts every reserved address, used or not.
        of = "address space" if "address space" in (failure.limited_by or "") else "memory"
        yield (
            f"`free` and `in use` are those at the peak of the process's {of}. After the failed step's own "
            f"memory was freed, {format_bytes(failure.free_after)} were free."
        )


def _verdict(failure: OutOfMemory) -> str:
    if failure.requested is None:
        return f"The requested size is unknown. The tightest limit: {failure.limited_by}."
    if not had_room(failure):
        return f"Limit: {failure.limited_by}."
    if failure.device != "host":
        return (
            f"Limit: {failure.limited_by}. As memlog read it, there was room for the request. Possibly "
            "another process freed memory in between, or the driver had no piece of this size."
        )
    return (
        "The tightest limit that memlog knows had room for the request, so another limit must have stopped "
        f"it. The tightest known limit: {failure.limited_by}."
    )


def _device(failure: OutOfMemory) -> Iterator[str]:
    """Yield a sentence on who holds the device's memory."""
    state, idle = failure.state, unused(failure)
    if state is None:
        return
    parts = []
    if state.outside:
        parts.append(
            f"{format_bytes(state.outside)} are in use outside PyTorch's allocator of this process"
        )
    if state.others:
        largest = state.processes[:_NAMED]
        names = ", ".join(f"{named(each)} {format_bytes(each.used)}" for each in largest)
        parts.append(f"other processes hold {format_bytes(state.others)} ({names})")
    if idle:
        parts.append(f"the allocator holds {format_bytes(idle)} that no tensor uses")
    if state.in_pools:
        parts.append(f"{format_bytes(state.in_pools)} belong to private pools of the allocator")
    if failure.limit is not None and failure.limit < (failure.capacity or 0):
        parts.append(
            f"the device has {format_bytes(failure.capacity)}, of which {format_bytes(state.free)} are free"
        )
    name = failure.device
    if state.shares_host:
        yield f"{name} shares the host's memory: `free` is what the machine could still give."
    if parts:
        yield f"On {name}, {'; '.join(parts)}."


def taken_by_others(state: FinalState) -> Iterator[str]:
    """Yield a sentence if other processes took much of the failed device during the run.

    If the driver does not tell whose memory it is, the sentence is about all memory outside the allocator. A
    process's own context and libraries are a part of that.
    """
    failure = state.failure
    if failure is None or failure.state is None or not failure.capacity:
        return
    found, kind, what = failure.state, OF_OTHERS, "outside PyTorch's allocator of this process"
    now, threshold = found.outside, max(_GREW * failure.capacity, _LEAST_OUTSIDE)
    if found.others is not None:
        kind, what, threshold = OTHER_PROCESSES, "of other processes", _GREW * failure.capacity
        now = found.others - sum(each.used or 0 for each in found.processes if each.is_child)
    step, least = state.least.get(failure.device + kind, (None, None))
    if now is None or least is None or now - least < threshold:
        return
    own = main_reading(state.first, failure.device) if state.first is not None else None
    held = None if own is None or own.device is None else own.device.reserved
    at = "" if step is None else f" at step {step:,}"
    yield (
        f"During the run, the memory {what} on {failure.device} grew from {format_bytes(least)}{at} to "
        f"{format_bytes(now)}. PyTorch's allocator of this process held {format_bytes(held)} after the first "
        f"step and {format_bytes(failure.reserved)} at the failure."
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table. The caller must separate it by blank lines from the text around it."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)
