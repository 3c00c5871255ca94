"""Memory that would have been enough for a failed allocation: held by others, withheld, or in pieces.

Each cause here is sufficient: without it, the request would have fitted. If two limits stopped the request,
freeing memory under one of them is not enough, and both are the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from memlog._internal.units import format_bytes
from memlog.events import DeviceProcess, DeviceState, OutOfMemory
from memlog.facts import oom_remedies as remedies

CauseKind: TypeAlias = Literal[
    "leak",
    "request",
    "other processes",
    "fraction",
    "fragmentation",
    "private pools",
    "pinned memory",
    "driver",
    "activity",
    "held",
    "step",
    "elsewhere",
]

_LEAST_UNUSED = 0.2
"""Unused pieces of memory count as the cause from this share of the limit on."""
_LEAST_MENTIONED = 0.1
"""Unused pieces of memory are mentioned beside another cause from this share of the limit on."""
_LEAST_ADVISED = 0.05
"""Advice on unused pieces of memory is given from this share of the limit on, whatever the cause."""
_LEAST_OTHERS = 0.25
"""Other processes count as the cause from this share of the device on."""
_LEAST_WITHHELD = 0.2
"""A memory fraction counts as the cause if it withholds at least this share of the device. A larger fraction
leaves room for libraries, and more memory would hardly help."""
_LEAST_OUTSIDE = 1024**3
"""Bytes outside the allocator count as other processes' from this size on, if the driver names no process. A
process's own CUDA context and libraries take less."""
_LEAST_POOLS = 0.25
_MOST = 0.5


class Cause(NamedTuple):
    """Cause of a failed allocation on a device."""

    kind: CauseKind
    clause: str
    """End of the report's title, after a colon."""
    remedies: tuple[str, ...] = ()
    """Lines of advice."""

    @property
    def is_of_the_step(self) -> bool:
        """True if a smaller step, or a smaller model, may help."""
        return self.kind in {"step", "elsewhere"}


def sufficient(failure: OutOfMemory) -> Cause | None:
    """Return the cause that alone explains the failure: without it, the request would have fitted.

    If there are several, the text names all.
    """
    found = [each(failure) for each in (_limits, _pools, _fragmentation)]
    known = [each for each in found if each is not None]
    if not known:
        return None
    return known[0]._replace(
        clause="; also, ".join(each.clause for each in known),
        remedies=tuple(remedy for each in known for remedy in each.remedies),
    )


def missing(failure: OutOfMemory) -> int:
    """Return the bytes by which the request exceeded the free memory; 0 if unknown."""
    if failure.requested is None or failure.free is None:
        return 0
    return max(failure.requested - failure.free, 0)


def _limits(failure: OutOfMemory) -> Cause | None:
    """Return other processes or the memory fraction as the cause: those that stopped the request.

    Both are the cause if both stopped it. Then neither of the two remedies alone helps.
    """
    of_device, of_fraction = _missing_on_device(failure), _missing_in_fraction(failure)
    if not of_fraction:
        return _others(failure, of_device)
    if not of_device:
        return _fraction(failure)
    others, fraction = _others(failure, of_device), _fraction(failure)
    if others is None or fraction is None:
        return None
    return Cause(
        "fraction",
        f"{fraction.clause}, and {others.clause}",
        (remedies.BOTH, *fraction.remedies, *others.remedies),
    )


def _missing_on_device(failure: OutOfMemory) -> int:
    """Return the bytes by which the request exceeded the device's free memory, whatever the fraction."""
    state = failure.state
    if state is None or state.free is None:
        return 0 if _allowed(failure) is not None else missing(failure)
    return max((failure.requested or 0) - state.free, 0)


def _missing_in_fraction(failure: OutOfMemory) -> int:
    """Return the bytes by which the request exceeded the memory fraction; 0 if there is none."""
    allowed = _allowed(failure)
    if allowed is None:
        return 0
    return max((failure.reserved or 0) + (failure.requested or 0) - allowed, 0)


def _allowed(failure: OutOfMemory) -> int | None:
    """Return the bytes of the device that torch's memory fraction allows; ``None``: there is no fraction."""
    if failure.state is not None and failure.state.allowed is not None:
        return failure.state.allowed
    is_fraction = failure.limit is not None and failure.limit < (failure.capacity or 0)
    return failure.limit if is_fraction else None


def _others(failure: OutOfMemory, least: int) -> Cause | None:
    """Return other processes as the cause if they hold at least ``least`` bytes, which the device lacked."""
    state, capacity = failure.state, failure.capacity
    if state is None or not capacity:
        return None
    known = state.others is not None
    size = (state.others if known else state.outside) or 0
    if size < max(least, _LEAST_OTHERS * capacity, 0 if known else _LEAST_OUTSIDE):
        return None
    if not known:
        return Cause(
            "other processes",
            f"{format_bytes(size)} of the device's {format_bytes(capacity)} are in use outside PyTorch's "
            "allocator of this process",
            (
                remedies.END_OTHERS,
                "The driver does not tell which processes these are, as inside a container.",
            ),
        )
    return Cause(
        "other processes",
        f"{_holders(state)} {format_bytes(size)} of the device's {format_bytes(capacity)}",
        tuple(_of_others(state.processes)),
    )


def _of_others(processes: Sequence[DeviceProcess]) -> Iterator[str]:
    if any(each.is_child for each in processes):
        yield (
            "This training started the process. Let it use less of the device or another one, or none: a "
            "DataLoader's workers should return tensors on the CPU."
        )
    if any(each.is_rank for each in processes):
        yield remedies.OWN_DEVICE
    if not processes or not all(each.is_child or each.is_rank for each in processes):
        yield remedies.END_OTHERS


def _holders(state: DeviceState) -> str:
    if len(state.processes) != 1:
        ranks = bool(state.processes) and all(each.is_rank for each in state.processes)
        return f"{len(state.processes)} other {'ranks of this training' if ranks else 'processes'} hold"
    [only] = state.processes
    what = "a child process" if only.is_child else "another process"
    return f"{'another rank of this training' if only.is_rank else what}, {named(only)}, holds"


def named(process: DeviceProcess) -> str:
    """Return a process's name and id as text."""
    return f"pid {process.pid}" if process.name is None else f"`{process.name}` (pid {process.pid})"


def _fraction(failure: OutOfMemory) -> Cause | None:
    allowed, capacity = _allowed(failure), failure.capacity or 0
    if allowed is None or allowed > (1 - _LEAST_WITHHELD) * capacity:
        return None
    needed = (failure.reserved or 0) + (failure.requested or 0)
    if needed > capacity:
        return None
    least = min(needed / capacity + 0.005, 1)
    return Cause(
        "fraction",
        f"this process may use only {format_bytes(allowed)} of the device's {format_bytes(capacity)} "
        "(memory fraction)",
        (
            "`torch.cuda.set_per_process_memory_fraction` sets this limit: this request needs a fraction of "
            f"at least {least:.2f}.",
        ),
    )


def unused(failure: OutOfMemory) -> int | None:
    """Return the bytes that the allocator holds outside private pools, and that no tensor uses.

    ``None``: unknown.
    """
    if failure.reserved is None or failure.allocated is None:
        return None
    in_pools = 0 if failure.state is None else failure.state.unused_in_pools or 0
    return max(failure.reserved - failure.allocated - in_pools, 0)


def _fragmentation(failure: OutOfMemory) -> Cause | None:
    idle, state = _in_pieces(failure), failure.state or DeviceState()
    if idle is None or idle < _LEAST_UNUSED * (failure.limit or 0):
        return None
    return Cause(
        "fragmentation",
        f"fragmentation, {_pieces(state, idle)}",
        tuple(_against_pieces(state, idle)),
    )


def mention_of_pieces(failure: OutOfMemory) -> str:
    """Return a clause on unused pieces of memory beside another cause; empty if there are few."""
    idle = _in_pieces(failure)
    if idle is None or idle < _LEAST_MENTIONED * (failure.limit or 0):
        return ""
    return f"; also, {_pieces(failure.state or DeviceState(), idle)}"


def _pieces(state: DeviceState, idle: int) -> str:
    where = f"{format_bytes(idle)} are free in the allocator's segments"
    if _is_of_streams(state, idle):
        return f"{where}, {format_bytes(state.unused_of_streams)} of it in segments of other CUDA streams"
    if state.largest_unused is None:
        return where
    return f"{where}, in pieces of at most {format_bytes(state.largest_unused)}"


def _in_pieces(failure: OutOfMemory) -> int | None:
    """Return the unused bytes in the allocator's segments if they would be enough in one piece.

    Before an allocation fails, the allocator returns to the driver what it can: whole segments, or whole
    pages of expandable segments. What is left is between tensors, and each stream has segments of its own.
    """
    idle, short, state = unused(failure), missing(failure), failure.state or DeviceState()
    if idle is None or not short or idle < short:
        return None
    return None if (state.largest_unused or 0) >= (failure.requested or 0) else idle


def _is_of_streams(state: DeviceState, idle: int) -> bool:
    return (state.unused_of_streams or 0) >= _MOST * idle


def _against_pieces(state: DeviceState, idle: int) -> Iterator[str]:
    if _is_of_streams(state, idle):
        yield remedies.STREAMS
    if state.expandable:
        yield remedies.PAGES
    else:
        yield f"{remedies.EXPANDABLE} may make most of the {format_bytes(idle)} that no tensor uses usable."


def advice_on_pieces(failure: OutOfMemory) -> Iterator[str]:
    """Yield advice on unused pieces of memory beside another cause, if there are many of them."""
    idle = _in_pieces(failure)
    if idle is not None and idle >= _LEAST_ADVISED * (failure.limit or 0):
        yield from _against_pieces(failure.state or DeviceState(), idle)


def _pools(failure: OutOfMemory) -> Cause | None:
    state = failure.state
    if state is None or not state.in_pools or state.unused_in_pools is None:
        return None
    is_large = state.in_pools >= _LEAST_POOLS * (failure.limit or 0)
    if not is_large or state.unused_in_pools < missing(failure):
        return None
    whose = "CUDA graphs' private pools" if state.of_graphs else "private memory pools"
    advice = (remedies.GRAPHS,) if state.of_graphs else (remedies.MEM_POOL, remedies.GRAPHS)
    return Cause(
        "private pools",
        f"{whose} hold {format_bytes(state.in_pools)}, which no other allocation can use "
        f"({format_bytes(state.unused_in_pools)} of it are unused)",
        advice,
    )
