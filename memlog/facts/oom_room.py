"""Memory that would have been enough for a failed allocation: held by others, withheld, or in pieces.

Each cause here is sufficient: without it, the request would have fitted. If two limits stopped the request,
freeing memory under one of them is not enough, and both are the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from memlog._internal.terminal import format_bytes
from memlog.events import DeviceProcess, DeviceState, OutOfMemory

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
    causes = [check(failure) for check in (_limits, _pools, _fragmentation)]
    known = [cause for cause in causes if cause is not None]
    if not known:
        return None
    return known[0]._replace(
        clause="; also, ".join(cause.clause for cause in known),
        remedies=tuple(remedy for cause in known for remedy in cause.remedies),
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
        (BOTH, *fraction.remedies, *others.remedies),
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
                END_OTHERS,
                "The driver does not tell which processes these are, as inside a container.",
            ),
        )
    return Cause(
        "other processes",
        f"{_holders(state)} {format_bytes(size)} of the device's {format_bytes(capacity)}",
        tuple(_of_others(state.processes)),
    )


def _of_others(processes: Sequence[DeviceProcess]) -> Iterator[str]:
    if any(process.is_child for process in processes):
        yield (
            "This training started the process. Let it use less of the device or another one, or none: a "
            "DataLoader's workers should return tensors on the CPU."
        )
    if any(process.is_rank for process in processes):
        yield OWN_DEVICE
    if not processes or not all(process.is_child or process.is_rank for process in processes):
        yield END_OTHERS


def _holders(state: DeviceState) -> str:
    if len(state.processes) != 1:
        ranks = bool(state.processes) and all(process.is_rank for process in state.processes)
        return f"{len(state.processes)} other {'ranks of this training' if ranks else 'processes'} hold"
    [only] = state.processes
    kind = "a child process" if only.is_child else "another process"
    return f"{'another rank of this training' if only.is_rank else kind}, {named(only)}, holds"


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
    # Half a hundredth more: the text shows two digits, and must not round the fraction down.
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
        yield STREAMS
    if state.expandable:
        yield PAGES
    else:
        yield f"{EXPANDABLE} may make most of the {format_bytes(idle)} that no tensor uses usable."


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
    advice = (GRAPHS,) if state.of_graphs else (MEM_POOL, GRAPHS)
    return Cause(
        "private pools",
        f"{whose} hold {format_bytes(state.in_pools)}, which no other allocation can use "
        f"({format_bytes(state.unused_in_pools)} of it are unused)",
        advice,
    )


EXPANDABLE = (
    "`PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9: `PYTORCH_CUDA_ALLOC_CONF`)"
)

GRAPHS = (
    "Graphs that replay in the order of their captures can share one pool: `torch.cuda.graph(second, "
    "pool=first.pool())`. Fewer graphs, such as for fewer batch sizes, need less."
)

MEM_POOL = (
    "Memory of a `torch.cuda.MemPool` serves only allocations under `torch.cuda.use_mem_pool`. Delete the "
    "pool and its tensors if they are no longer needed; `MemPool(use_on_oom=True)` lets other allocations "
    "use it before memory runs out."
)

PINNED = (
    "PyTorch rounds a block of pinned memory up to a power of two, and keeps freed blocks. Pin fewer or "
    "smaller tensors, such as with a smaller `prefetch_factor`, or use `DataLoader(pin_memory=False)`. In "
    "torch 2.13, `PYTORCH_ALLOC_CONF=pinned_max_cached_size_mb:N` neither rounds nor keeps blocks over N MiB."
)

NO_GRAD = (
    "Evaluate under `with torch.no_grad():` or `torch.inference_mode()`; `model.eval()` alone does not "
    "switch gradients off."
)

STATE = (
    "A smaller batch does not help here: the optimizer's state has the same size for every batch. Use an "
    "optimizer with less state (Adam keeps two numbers for each parameter, SGD with momentum one), an 8-bit "
    "optimizer (a quarter of the bytes), or sharding (FSDP, ZeRO)."
)

MODEL = (
    "A smaller batch does not help here: the parameters and buffers alone do not fit. Load them in "
    "`torch.bfloat16` (half the bytes), use a smaller model, or shard it "
    "(`torch.distributed.fsdp.fully_shard`). `memlog.estimate` tells what training it takes."
)

COPY = (
    "Copy to the host's memory: `{name: value.cpu() for name, value in model.state_dict().items()}`. "
    "`torch.save(model.state_dict(), path)` needs no copy on the device."
)

BUCKETS = (
    "DistributedDataParallel needs its buckets beside the parameters. `torch.distributed.fsdp.fully_shard` "
    "divides parameters, gradients and optimizer state among the devices. With "
    "`gradient_as_bucket_view=True` the buckets stay, but the gradients take no memory of their own."
)

CACHE = (
    "The cache of keys and values grows with the batch and with each token: generate for fewer sequences at "
    "once, limit `max_new_tokens`, or use a smaller or quantized cache."
)

END_OTHERS = (
    "`nvidia-smi` lists the processes on the device. End those that are not needed, such as a notebook's "
    "kernel or an earlier run, or train on another device (`CUDA_VISIBLE_DEVICES`)."
)

OWN_DEVICE = (
    "Give each rank a device of its own: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before its "
    "first tensor, and `map_location` for `torch.load`."
)

EVALUATION = (
    "A smaller batch for the evaluation, and results moved to the host (`.cpu()`), need less."
)

BOTH = "Both limits stop this request, so that it needs both of these remedies."

PAGES = (
    "With expandable segments, the allocator returns only whole pages to the driver (20 MiB for large "
    "tensors, 2 MiB for small ones), and a tensor that stays alive holds its page. Make the sizes of tensors "
    "vary less: pad inputs to a few lengths, and make tensors that stay alive before those of the steps."
)

STREAMS = (
    "Memory that was allocated on one stream can only be used again on this stream. Allocate large tensors "
    "on as few streams as possible; `tensor.record_stream(stream)` lets another stream use a tensor safely."
)

HELD = (
    "Hold fewer of these tensors on the device at a time: load or compute them later, move them to the host "
    "(`.cpu()`), or remove those that are no longer needed."
)

KEPT_GRAPH = (
    "A graph keeps the activations of its forward pass until `backward()`. To accumulate gradients, call "
    "`(loss / n).backward()` for each batch in place of one call for the sum. In a recurrent network, "
    "`hidden.detach()` after some steps ends the graph."
)

FOR_TEMPORARY = (
    "A smaller batch does not help here: an optimizer's step needs memory by the size of the parameters. "
    "`fused=True` or `foreach=False` avoids temporary copies, which torch's optimizers make of all "
    "parameters of a device by default. An optimizer with less state, an 8-bit optimizer or sharding (FSDP, "
    "ZeRO) needs less in every step."
)
