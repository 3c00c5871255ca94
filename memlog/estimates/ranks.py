"""One rank of a training on several devices: process group, meshes, wrappers, pipeline stages, collectives.

The rank runs alone, in torch's fake process group, whose collectives return at once. What a rank allocates
follows from shapes, so it is the same as beside the others.

Before the first step, each stage asks its neighbours for the shapes of its inputs and gradients. If the
answer does not exist yet, the rank's run ends there, and begins again after the neighbour has run.

On a CUDA device, NCCL works in the program's tensors. On the CPU, gloo works in copies. The rules for gloo
are those of ``ProcessGroupGloo.cpp`` in torch 2.13, and are tested against two real ranks.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, TypeAlias, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memlog.errors import ConfigurationError
from memlog.estimates import fake_mode
from memlog.estimates.cpu_workspaces import bytes_of
from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.places import Places
from memlog.torchside import ranks as torch_ranks
from memlog.torchside.fakes import (
    FakeTensor,
    TorchDispatchMode,
    tree_leaves,
    without_dispatch,
    without_modes,
)
from memlog.torchside.tensors import DisableTorchFunction
from memlog.tracer.engines.op_workspace import Workspace
from memlog.tracer.engines.simulated_step import SIMULATED

_OF_MESHES: Final = ("__getitem__", "_flatten", "_unflatten", "get_local_rank", "from_group")
"""Methods that calculate with the numbers of ranks."""


@contextmanager
def one_rank_of(ranks: int, mode: FakeMode, rank: int = 0) -> Iterator[None]:
    """Let the program inside the block be one rank of a training with ``ranks`` processes.

    ``mode`` is the mode of the program's tensors.

    Raises:
        ConfigurationError: The process belongs to a process group already.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is initialized already, and ranks= lets the estimate do that: leave out the "
            "call of init_process_group, or make it in the function that makes the model"
        )
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
    with ExitStack() as undo:
        undo.enter_context(patch.object(mode, "has_real_indices", True))
        undo.enter_context(
            patch.dict(os.environ, {key: str(value) for key, value in environment.items()})
        )
        undo.enter_context(counted_collectives(on_cpu=mode.places is None))
        # torch's own fake result is a copy.
        undo.enter_context(patch.dict(fake_mode.INSTEAD, {torch_ranks.WAIT: lambda values: values}))
        # torch replaces the exception hook, and keeps the new one after the group's end.
        undo.enter_context(patch.object(sys, "excepthook", sys.excepthook))
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=torch_ranks.fake_store())
        undo.callback(dist.destroy_process_group)
        undo.enter_context(
            patch.object(dist, "init_process_group", functools.partial(_joined, ranks))
        )
        undo.enter_context(patch.object(torch.cuda, "set_device", lambda _: None))
        undo.enter_context(patch.object(DeviceMesh, "__init__", _mesh_made(DeviceMesh.__init__)))
        for name in _OF_MESHES:
            undo.enter_context(
                patch.object(DeviceMesh, name, _within(_real_tensors, getattr(DeviceMesh, name)))
            )
        undo.enter_context(torch_ranks.chunks_of_parameters(Chunks))
        undo.enter_context(torch_ranks.cuda_functions(_Device(ranks, mode.places)))
        if mode.places is not None:
            # Without a GPU, torch would make the mesh of a model that is sharded without one for the CPU.
            mesh = functools.partial(_default_mesh, ranks)
            undo.enter_context(torch_ranks.default_mesh(mesh))
        device_of_part = property(lambda tensor: tensor._local_tensor.device)
        undo.enter_context(patch.object(DTensor, "device", device_of_part, create=True))
        for name in ("__init__", "_pre_forward"):
            own = _within(_RealIndices, getattr(DistributedDataParallel, name))
            own = _beside_parameters(_replicated(own) if name == "__init__" else own, mode.places)
            undo.enter_context(patch.object(DistributedDataParallel, name, own))
        # torch asks for the shapes of whole tensors, which no rank has: they must not count.
        name = "_propagate_tensor_meta_non_cached"
        propagate = _within(_real_tensors, getattr(torch_ranks.ShardingPropagator, name))
        undo.enter_context(patch.object(torch_ranks.ShardingPropagator, name, propagate))
        undo.enter_context(torch_ranks.each_layout_once())
        yield


class _Device:
    """What torch asks ``torch.cuda`` for in a training on several devices: streams, events and the device."""

    def __init__(self, ranks: int, places: Places | None) -> None:
        self._ranks = ranks
        self._places = places
        self._streams = 0
        self._stream = _Stream(0)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return self._ranks

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_stream(self) -> _Stream:
        return self._stream

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before = self._stream
        self._use(stream)
        try:
            yield
        finally:
            self._use(before)

    def _use(self, stream: _Stream) -> None:
        self._stream = stream
        if self._places is not None:
            self._places.stream = stream.number

    def Stream(self, priority: int = 0) -> _Stream:  # noqa: N802, ARG002 - torch's name
        self._streams += 1
        return _Stream(self._streams)

    def Event(self, **_: Any) -> _Stream:  # noqa: N802 - torch's name
        return _Stream(0)


class _Stream:
    """Stream or event of a device that runs nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def wait_event(self, _: object) -> None: ...

    wait_stream = wait = wait_event

    def record(self, _: object = None) -> _Stream:
        return self

    record_event = record

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _joined(ranks: int, *_: Any, world_size: int = -1, **__: Any) -> None:
    """Take the place of ``init_process_group`` in the program."""
    if world_size not in (-1, ranks):
        raise ConfigurationError(
            f"the program joins a process group of {world_size} ranks, but the estimate is for {ranks}"
        )


class Chunks(Sequence[Tensor]):
    """The parts of a parameter for all ranks, as `torch.chunk` makes them, each made when it is asked for.

    FSDP asks for two of them. Ranks for which nothing is left get an empty tensor.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim, self._count = tensor, dim, num_chunks
        self._length = tensor.shape[dim]
        self._size = -(-self._length // num_chunks)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        begin = range(self._count)[at] * self._size
        size = min(self._size, self._length - begin)
        if size <= 0 and at:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, size)


def _default_mesh(ranks: int, mesh_dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cuda", (ranks,), mesh_dim_names=mesh_dim_names)


def _within(
    context: Callable[[], AbstractContextManager[object]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that runs inside a context, which each call makes anew."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return call


@contextmanager
def _real_tensors() -> Iterator[None]:
    with without_modes(), DisableTorchFunction():
        yield


def _mesh_made(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        with without_modes():
            init(
                self,
                *map(_in_order, args),
                **{key: _in_order(value) for key, value in kwargs.items()},
            )

    return make


def _replicated(init: Callable[..., None]) -> Callable[..., None]:
    """Let a model in DistributedDataParallel reduce its gradients without the other ranks."""

    @functools.wraps(init)
    def make(
        self: Any,
        module: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # A synchronisation compares shapes by the addresses of real tensors.
        given = {**kwargs, "device_ids": None, "output_device": None, "init_sync": False}
        init(self, module, *args[2:], **given)
        self.register_comm_hook(None, in_place_of_all_reduce)

    return make


def in_place_of_all_reduce(_, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations as texts
    """Take the place of the all-reduce, which the fake process group does not return to DDP."""
    future = torch.futures.Future[Tensor]()
    future.set_result(bucket.buffer())
    return future


class _RealIndices(TorchDispatchMode):
    """Mode that makes real integers: DDP's code in C++ reads those of its buckets by address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        is_real = not is_fake if tensors else kwargs.get("dtype") is torch.int32
        with without_modes() if is_real else nullcontext():
            return func(*args, **kwargs)


def _beside_parameters(function: Callable[..., Any], places: Places | None) -> Callable[..., Any]:
    """Let a method make its buffers where the model's parameters are."""
    if places is None:
        return function

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = args[0] if "module" not in self.__dict__.get("_modules", {}) else self.module
        place = next(map(places.of, module.parameters()), None)
        with places.asking(place):
            return function(self, *args, **kwargs)

    return call


def _in_order(value: Any) -> Any:
    """Return the numbers of ranks in order instead of a fake tensor, which has none."""
    if isinstance(value, FakeTensor):
        return torch.arange(value.numel(), dtype=torch.int).view(value.shape)
    return value


_Found = TypeVar("_Found")


class _AnswerMissing(BaseException):
    """A rank needs an answer of another one, which has not run so far. No ``except Exception`` catches it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def found_by_rank(find: Callable[[int], _Found]) -> dict[int, _Found]:
    """Return what ``find`` finds for the first rank, and for the ranks of its pipeline's other stages.

    ``find`` gets a rank, and runs the program as this rank.

    Raises:
        ConfigurationError: The stages wait for each other, or their order can't be followed.
    """
    messages = _Messages()
    results: dict[int, _Found] = {}
    known = [0]
    while waiting := [rank for rank in known if rank not in results]:
        before = len(known), len(results), messages.count()
        for rank in waiting if len(known) % 2 else reversed(waiting):
            with messages.of(rank):
                asked = _run(find, rank, results)
            if asked is not None and asked not in known:
                known.append(asked)
        if before == (len(known), len(results), messages.count()):
            raise ConfigurationError(
                "the stages of the pipeline wait for each other in an order that an estimate can't follow: "
                "estimate each stage as a model of its own"
            )
    return dict(sorted(results.items()))


def _run(find: Callable[[int], _Found], rank: int, found: dict[int, _Found]) -> int | None:
    """Run a rank, to its end or to an answer that is missing. Return the rank whose answer this is."""
    try:
        found[rank] = find(rank)
    except _AnswerMissing as missing:
        return missing.rank
    return None


class _Messages:
    """Messages between the ranks of a pipeline."""

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)

    def count(self) -> int:
        return sum(map(len, self._sent.values()))

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Inside the block, the program is ``rank``: it sends its messages anew, and reads the others'."""
        # A list, because the loop deletes keys.
        for route in [key for key in self._sent if key[0] == rank]:
            del self._sent[route]
        read: defaultdict[int, int] = defaultdict(int)

        def send(objects: list[Any], dst: int, **_: Any) -> None:
            # Real messages are pickled, so the receiver gets a copy.
            self._sent[rank, dst] += copy.deepcopy(objects)

        def receive(objects: list[Any], src: int, **_: Any) -> None:
            sent = self._sent[src, rank]
            for place in range(len(objects)):
                if read[src] >= len(sent):
                    raise _AnswerMissing(src)
                objects[place] = copy.deepcopy(sent[read[src]])
                read[src] += 1

        with ExitStack() as undo:
            undo.enter_context(patch.object(dist, "send_object_list", send))
            undo.enter_context(patch.object(dist, "recv_object_list", receive))
            # The stages vote on whether each of them knows its shapes. They always ask here: a vote that is
            # received has no value in an estimate.
            for vote in ("_warmup_forward_vote", "_warmup_backward_result"):  # older torch has none
                undo.enter_context(patch.object(PipelineStage, vote, _no_vote, create=True))
            # A schedule saves the states of the device's generators, which an estimate does not have.
            undo.enter_context(patch.object(torch.random, "fork_rng", lambda **_: nullcontext()))
            yield


def _no_vote(*_: Any, **__: Any) -> Any:
    with without_dispatch():
        return torch.zeros(1, dtype=torch.int32)


_NAMESPACES: Final = ("c10d", "_c10d_functional", "c10d_functional", "fsdp")
_NONE: Final = Workspace(0, 0)
_Rule: TypeAlias = Callable[[Any, Any], int]
"""Function of a call's positional and keyword arguments that returns the bytes of the buffers."""


def counted_collectives(*, on_cpu: bool) -> AbstractContextManager[None]:
    """Inside the block, count what collectives allocate inside themselves: gloo's, or NCCL's (nothing)."""
    return SIMULATED.knowing(known_workspace=inside_gloo if on_cpu else _of_nccl)


def _of_nccl(func: Any, _: Any, __: Any) -> Workspace | None:
    return _NONE if getattr(func, "namespace", None) in _NAMESPACES else None


def inside_gloo(func: Any, args: Any, kwargs: Any) -> Workspace | None:
    """Return what an operation allocates inside itself with gloo; ``None``: unknown."""
    schema = getattr(func, "_schema", None)
    rule = None if schema is None else _GLOO.get(schema.name)
    return None if rule is None else Workspace(rule(args, kwargs), 0)


def _nothing(_: Any, __: Any) -> int:
    return 0


def _copy_of(position: int) -> _Rule:
    """Return the rule of a collective that works in a copy of one of its arguments."""
    return lambda args, _: _size(args[position])


def _gathered(args: Any, _: Any) -> int:
    """Return the bytes of what all ranks send, before they are in the result."""
    values, ranks, *_rest = args
    return _size(values) * int(ranks)


def _chunk_cat(args: Any, kwargs: Any) -> int:
    """Return the bytes of gradients that FSDP pads or makes contiguous, and of the sum in their own type.

    On the CPU ``aten::_chunk_cat`` is composed of other operations.
    """
    tensors, dim, chunks = args[:3]
    out = kwargs["out"]
    copies = 0
    for tensor in tensors:
        padded = -(-tensor.shape[dim] // chunks) * chunks
        if padded != tensor.shape[dim] or not tensor.is_contiguous():
            copies += bytes_of(tensor) // max(tensor.shape[dim], 1) * padded
    kind = tensors[0].dtype
    return copies + (0 if kind is out.dtype else out.numel() * kind.itemsize)


def _size(values: Any) -> int:
    return sum(bytes_of(tensor) for tensor in tree_leaves(values) if isinstance(tensor, Tensor))


_GLOO: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(
        (
            *("c10d::allreduce_", "c10d::alltoall_base_", "c10d::barrier", "c10d::broadcast_"),
            *("c10d::recv_", "c10d::reduce_", "c10d::send"),
            *("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_"),
            *("_c10d_functional::all_to_all_single", "_c10d_functional::broadcast"),
            *("_c10d_functional::broadcast_", "_c10d_functional::wait_tensor"),
            *("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"),
        ),
        _nothing,
    ),
    "c10d::_allgather_base_": _copy_of(0),
    "c10d::_reduce_scatter_base_": _copy_of(1),
    "c10d::allgather_": _copy_of(0),
    "c10d::allreduce_coalesced_": _copy_of(0),
    "_c10d_functional::all_gather_into_tensor": _gathered,
    "_c10d_functional::reduce_scatter_tensor": _copy_of(0),
    "fsdp::chunk_cat": _chunk_cat,
}
"""Rules by an operation's name. What the others allocate, such as the coalesced ones, is unknown."""
