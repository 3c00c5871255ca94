"""Device memory beyond that of tensors: what CUDA's allocator reserves, cuBLAS's workspaces, the context.

Each handle of cuBLAS has a workspace for each stream. torch allocates it at the handle's first product, and
keeps it. Each thread has a handle of its own. A step that runs on one stream uses two: that of the thread
that calls it, and that of autograd's thread for the device. cuBLASLt uses the same workspaces. Source:
``aten/src/ATen/cuda/CublasHandlePool.cpp`` (torch 2.13).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memlog._internal.terminal import MIB
from memlog.estimates.caching_allocator import CachingAllocator, OutOfMemoryError
from memlog.estimates.cuda_kernels.reductions import Gpu
from memlog.estimates.places import DEVICE, Places
from memlog.torchside import internals
from memlog.trace import encoding
from memlog.trace.records import RecordedTrace
from memlog.tracer.engines.operation_recorder import UNMEASURED_PREFIX

_NAMES: Final = """
    mm addmm bmm baddbmm addbmm mv addmv dot vdot _addmm_activation _scaled_mm _int_mm
    _trilinear _euclidean_dist affine_grid_generator deform_conv2d _deform_conv2d_backward
"""
_PRODUCTS: Final = frozenset(_NAMES.split())
"""Operations that compute a product, perhaps inside."""
_DEFAULT: Final = 4096 * 2 + 16 * 8
_LARGE: Final = 32 * 1024
"""Default sizes in KiB: ``:4096:2:16:8``, and 32 MiB on GPUs of some generations."""
_WITH_LARGE: Final = (9, 10, 12)
"""Major numbers of the compute capabilities with the large default: Hopper and Blackwell."""


class Cublas:
    """Workspaces of the handles that a traced step uses."""

    def __init__(self, gpu: Gpu, places: Places) -> None:
        self._places = places
        self._size = workspace_size(gpu)
        self._of_threads: dict[bool, Tensor] = {}

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return tuple(self._of_threads.values())

    def take(self, func: Any) -> tuple[Tensor, ...]:
        if internals.operation_name(func).rstrip("_") not in _PRODUCTS or not self._size:
            return ()
        # Autograd's thread has a handle of its own.
        backward = internals.backward_task() != internals.NO_TASK
        if backward in self._of_threads or self._places.is_elsewhere(self._places.of_operation()):
            return ()
        with self._places.asking(DEVICE):
            self._of_threads[backward] = torch.empty(self._size, dtype=torch.uint8)
        return (self._of_threads[backward],)


def workspace_size(gpu: Gpu) -> int:
    """Return the bytes of a workspace, from ``CUBLAS_WORKSPACE_CONFIG`` or torch's defaults."""
    configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", configured)
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * 1024
    return (_LARGE if gpu.capability[0] in _WITH_LARGE else _DEFAULT) * 1024


_LATER_STEPS: Final = 5
"""Maximum number of replays of the later step. In real trainings, the reserved bytes did not grow after the
third step."""
_STEADY: Final = 2
"""Number of replays in succession after which the replay ends, if none of them needs more memory."""


class SizeRange(NamedTuple):
    """Lowest and highest estimate, in bytes, of memory whose exact size is unknown."""

    low: int
    high: int
    what: str
    source: str


CONTEXT = SizeRange(
    256 * MIB,
    640 * MIB,
    "CUDA's context, driver, and kernels loaded as they are used",
    "about 300 and 400 MiB: pytorch/pytorch#107667, #109888; 616 MiB: LMCache/LMCache#4019",
)

CUDNN: Final = (
    "cuDNN's workspaces are not counted, because their size depends on the algorithms that cuDNN chooses on "
    "the device."
)
RECURRENT: Final = (
    "Recurrent layers are estimated as if PyTorch computed them. On the device, cuDNN computes them and "
    "keeps other tensors."
)
NCCL: Final = "Buffers of NCCL, outside the allocator, are not counted."
NO_BACKWARD: Final = "The step never runs a backward pass, so gradients are not counted."
NO_STEP: Final = (
    "The step never calls the optimizer's step(), so the optimizer's state is not counted."
)
_IN_SHORT: Final = {
    NO_BACKWARD: "gradients",
    NO_STEP: "the optimizer's state",
    CUDNN: "cuDNN's workspaces",
    RECURRENT: "what cuDNN keeps for recurrent layers",
    NCCL: "NCCL's buffers",
}
_BUFFERS: Final = -(1 << 40)
"""Key of the first buffer of recurrent layers' weights. No storage of a trace has such a key."""

_Change: TypeAlias = tuple[int, int]
"""A storage's key, and its bytes; 0 bytes: the storage is freed."""


def in_short(sentences: Collection[str]) -> Iterator[str]:
    """Return what sentences of `Estimate.uncounted` are about, in a few words for each."""
    other = False
    for sentence in sentences:
        if sentence.startswith(UNMEASURED_PREFIX):
            names = sentence.removeprefix(UNMEASURED_PREFIX).removesuffix(".").split(", ")
            if CUDNN in sentences:
                names = [name for name in names if "convolution" not in name]
            if names:
                yield f"what {', '.join(names)} takes inside"
        elif sentence in _IN_SHORT:
            yield _IN_SHORT[sentence]
        else:
            other = True
    if other:
        yield "what the warnings name"


class Replay:
    """Allocations of a training: its set-up, its first step, and a later step, which is repeated."""

    def __init__(self, training: TracedTraining) -> None:
        first, later = _Events(training.first), _Events(training.later)
        same = training.same
        self._recurrent = training.recurrent
        self._set_up = list(_set_up(first.before, training))
        self._first = first.changes
        # A later step's own storages get keys below 0, so that no key means two storages.
        keys = {key: same.get(key, -key) for key in (*later.before, *later.sizes)}
        self._between = [(keys[key], size) for key, size in later.before.items() if key not in same]
        self._later = [(keys[key], size) for key, size in later.changes]
        self._replaced = [(keys[new], keys[old]) for new, old in later.replaced()]
        self._kept = [keys[key] for key in later.kept()]
        of_first, of_later = training.streams
        later_streams = {keys[key]: stream for key, stream in of_later.items() if key in keys}
        self._streams = {**of_first, **later_streams}

    def on(self, allocator: CachingAllocator) -> bool:
        """Replay the training on an allocator. Return False if it runs out of memory."""
        steady, needed = 0, (0, 0)
        try:
            for _ in self.steps(allocator):
                before, needed = needed, (allocator.most_reserved, allocator.most_allocated)
                steady = steady + 1 if before == needed else 0
                if steady == _STEADY:
                    break
        except OutOfMemoryError:
            return False
        return True

    def steps(self, allocator: CachingAllocator) -> Iterator[None]:
        """Replay the training on an allocator, and yield after each step.

        Raises:
            OutOfMemoryError: The allocator's memory is too small.
        """
        run = _Run(allocator, self._streams)
        run.replay(self._set_up)
        run.replay(self._first)
        yield
        run.replay(self._between)
        for _ in range(_LATER_STEPS):
            run.replay(self._later)
            run.rename(self._replaced)
            run.replay((key, 0) for key in self._kept)
            yield

    def uncounted(self, unseen: Iterable[str], ranks: int | None) -> Iterator[str]:
        """Return sentences about memory of NVIDIA's libraries. ``unseen``: Sentences of the trace."""
        if self._recurrent:
            yield RECURRENT
        if any("convolution" in sentence or "cudnn" in sentence for sentence in unseen):
            yield CUDNN
        available = torch.distributed.is_available()
        if ranks is not None or (available and torch.distributed.is_initialized()):
            yield NCCL


class _Events:
    """Allocations of one traced step.

    Attributes:
        before: Bytes of the storages from before the trace, by key.
        sizes: Bytes of the storages that the step allocated, by key.
        changes: Allocations and frees in order.
    """

    def __init__(self, trace: RecordedTrace) -> None:
        self.before: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.changes: list[_Change] = []
        for event, allocation in encoding.decode_with_allocations(trace.events):
            if event.kind == encoding.ALLOC and event.phase == encoding.BEFORE:
                self.before[event.key] = event.size
            elif event.kind == encoding.ALLOC:
                self.sizes[event.key] = event.size
                self.changes.append((event.key, event.size))
            elif event.kind == encoding.FREE and allocation is not None:
                self.changes.append((event.key, 0))
        self._freed = [key for key, size in self.changes if not size]

    def replaced(self) -> Iterator[tuple[int, int]]:
        """Return storages that outlive the step, each with a storage from before that the step freed.

        Both have the same size: the one stands for the other in the next step.
        """
        old = defaultdict[int, list[int]](list)
        for key in self._freed:
            if key in self.before:
                old[self.before[key]].append(key)
        for key in self._outliving():
            if old[self.sizes[key]]:
                yield key, old[self.sizes[key]].pop(0)

    def kept(self) -> list[int]:
        """Return storages that outlive the step in addition to those from before."""
        replacing = {new for new, _old in self.replaced()}
        return [key for key in self._outliving() if key not in replacing]

    def _outliving(self) -> list[int]:
        freed = set(self._freed)
        return [key for key in self.sizes if key not in freed]


class _Run:
    """Replay on one allocator. A storage that is allocated again gets a new key in the allocator."""

    def __init__(self, allocator: CachingAllocator, streams: Mapping[int, int]) -> None:
        self._allocator = allocator
        self._streams = streams
        self._keys: dict[int, int] = {}
        self._next = 0

    def replay(self, changes: Iterable[_Change]) -> None:
        for key, size in changes:
            if size:
                self._next += 1
                self._keys[key] = self._next
                self._allocator.allocate(self._next, size, self._streams.get(key, 0))
            elif key in self._keys:
                self._allocator.free(self._keys.pop(key))

    def rename(self, replaced: Sequence[tuple[int, int]]) -> None:
        for new, old in replaced:
            if new in self._keys:
                self._keys[old] = self._keys.pop(new)


def _set_up(before: dict[int, int], training: TracedTraining) -> Iterator[_Change]:
    """Return the allocations before the first step: those of the model, then all others."""
    rest = dict(before)
    for number, group in enumerate(training.set_up):
        storages = [(key, size) for key in group if (size := rest.pop(key, 0))]
        yield from storages
        if len(storages) > 1:  # weights of a recurrent layer
            yield _BUFFERS - number, sum(size for _key, size in storages)
            yield from ((key, 0) for key, _size in storages)
    yield from rest.items()


_ON_HOST: Final = ("step", "mu_product")
"""State that torch's optimizers keep on the CPU, unless they are capturable or fused."""


class TracedTraining(NamedTuple):
    """Traces of a training's first step, and of its second, which stands for all later steps.

    Attributes:
        first: Trace of the step that makes the optimizer's state.
        later: Trace of the second step.
        set_up: Keys in ``first`` of the model's storages, in the order in which ``model.to(device)``
            allocates them. Each tuple has the storages of one group, see `moved_together`.
        same: For keys in ``later``, the keys of the same storages in ``first``.
        on_host: Highest number of bytes of tensors on the host, which the traces leave out.
        recurrent: True if a recurrent layer ran.
        streams: Streams of the storages that each of the two steps allocates for another stream than the
            usual one, by their keys.
    """

    first: RecordedTrace
    later: RecordedTrace
    set_up: Sequence[Sequence[int]]
    same: Mapping[int, int]
    on_host: int
    recurrent: bool
    streams: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})


def moved_together(model: nn.Module | None) -> Iterator[Sequence[Tensor]]:
    """Return a model's tensors in the order in which ``model.to(device)`` moves them.

    Each list has one tensor, or the weights of a recurrent layer. cuDNN copies these into one buffer.
    """
    if model is None:
        return
    # `Module._apply` moves the children first.
    for child in model.children():
        yield from moved_together(child)
    own = [parameter for parameter in model._parameters.values() if parameter is not None]
    if isinstance(model, nn.RNNBase):
        yield own
    else:
        yield from ([parameter] for parameter in own)
    yield from ([buffer] for buffer in model._buffers.values() if buffer is not None)


def host_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Return the optimizers' tensors that lie on the CPU, such as Adam's step counters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("capturable") or group.get("fused"):
                continue
            for parameter in group["params"]:
                state = optimizer.state.get(parameter) or {}
                values = (state.get(name) for name in _ON_HOST)
                yield from (
                    value for value in values if isinstance(value, Tensor) and not value.ndim
                )
