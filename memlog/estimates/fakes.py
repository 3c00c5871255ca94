"""Replacement of a training's tensors by fake ones, and steps that need other processes."""

from __future__ import annotations

import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import dataloader

from memlog.errors import ConfigurationError
from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.places import DEVICE
from memlog.torchside.fakes import (
    DataDependentOutputException,
    FakeTensor,
    LoaderIterator,
    other_trunc_normal,
    tree_leaves,
    tree_map_only,
    trunc_normal,
    without_modes,
)
from memlog.tracer.tensor_storages import is_wrapper


class Fakes:
    """Fake tensors with the shapes, strides and types of real tensors, one for each real tensor.

    All fakes lie on the CPU, because memlog's CPU engine can trace the operations there.
    """

    def __init__(self, mode: FakeMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor, or the tensor itself if it is a fake.

        The fake of a parameter is a parameter, too.
        """
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
            return tensor
        if is_distributed(tensor):
            return self._of_distributed(tensor)
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise ConfigurationError(
                "a parameter has hooks, which an estimate would not call: pass model= as a function that "
                "makes the model and registers the hooks"
            )
        if id(tensor) not in self._made:
            fake = self._mode.empty(tensor.shape, tensor.stride(), tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            if tensor.is_cuda and self._mode.places is not None:
                self._mode.places.put(fake, DEVICE)
                self._mode.places.cuda_named()
            # The tensor is kept, too. Otherwise another tensor could get its `id`.
            self._made[id(tensor)] = tensor, fake
        return self._made[id(tensor)][1]

    def _of_distributed(self, tensor: Any) -> Tensor:
        part = tensor._local_tensor
        fake = self.of(part)
        if fake is part:
            return tensor  # type: ignore[no-any-return]
        if id(tensor) not in self._made:
            whole = type(tensor)(fake.detach(), tensor._spec, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                whole = nn.Parameter(whole, tensor.requires_grad)
            self._made[id(tensor)] = tensor, whole
        return self._made[id(tensor)][1]

    def counted(self, tensor: Tensor) -> Tensor:
        """Return the tensor that a trace counts instead of ``tensor``. Modes may be active."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) in self._made:
            return self._made[id(tensor)][1]
        with without_modes():
            return self.of_used(tensor)

    def in_all(self, values: Any) -> Any:
        """Return nested values in which every tensor is replaced by its fake."""
        return tree_map_only(Tensor, self.of, values)

    def of_used(self, tensor: Tensor) -> Tensor:
        """Return the tensor that an operation of the step gets instead of ``tensor``.

        Raises:
            ConfigurationError: The tensor is a parameter of an unknown model. Its gradient would be lost.
        """
        if isinstance(tensor, FakeTensor) or is_distributed(tensor) or not tensor.ndim:
            return tensor
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            raise ConfigurationError(
                f"the step uses a parameter of shape {tuple(tensor.shape)} that memlog.estimate did not get: "
                "pass model=, for several models an nn.ModuleList of them"
            )
        return self.of(tensor)

    @contextmanager
    def replace(
        self, model: nn.Module | None, optimizers: Iterable[Optimizer] = ()
    ) -> Iterator[None]:
        """Give a model and optimizers fake tensors inside the block, and their own tensors afterwards.

        Inside the block, operations also get fakes instead of real tensors. What has only fakes already stays
        as it is: if sharding replaces these, nothing keeps them.
        """
        with ExitStack() as undo:
            self._mode.convert = self.of_used
            if self._mode.places is not None:
                self._mode.places.stand_in = self.counted
            undo.callback(setattr, self._mode, "convert", None)
            for module in () if model is None else model.modules():
                self._replace_in(module._parameters, undo)
                self._replace_in(module._buffers, undo)
            for optimizer in optimizers:
                self._replace_in_optimizer(optimizer, undo)
            yield

    def _replace_in(self, tensors: dict[str, Any], undo: ExitStack) -> None:
        if self._are_fakes(tensors):
            return
        undo.callback(tensors.update, dict(tensors))
        undo.callback(tensors.clear)  # is called first
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = self.of(tensor)

    def _are_fakes(self, values: Any) -> bool:
        tensors = [tensor for tensor in tree_leaves(values) if isinstance(tensor, Tensor)]
        return all(self.of(tensor) is tensor for tensor in tensors)

    def _replace_in_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        if self._are_fakes((groups, list(state.items()))):
            return
        undo.callback(setattr, optimizer, "param_groups", groups)
        undo.callback(setattr, optimizer, "state", state)
        optimizer.param_groups = [self.in_all(dict(group)) for group in groups]
        optimizer.state = defaultdict(
            dict, {self.of(parameter): self.in_all(dict(own)) for parameter, own in state.items()}
        )


@contextmanager
def real_indices() -> Iterator[None]:
    """Let data loaders draw real seeds and indices inside the block, because they decide by their values."""
    kind = LoaderIterator
    with (
        patch.object(kind, "_next_index", _without_modes(kind._next_index)),
        patch.object(
            dataloader.DataLoader, "__iter__", _without_modes(dataloader.DataLoader.__iter__)
        ),
    ):
        yield


def _without_modes(draw: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any) -> Any:
        with without_modes():
            return draw(*args)

    return outside


@contextmanager
def any_initial_values() -> Iterator[None]:
    """Let ``torch.nn.init.trunc_normal_`` leave fake tensors as they are inside the block."""

    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(part_of(tensor), FakeTensor):
            return tensor
        return trunc_normal(tensor, *args, **kwargs)

    with other_trunc_normal(fill):
        yield


_REPLICATED: Final = (
    "a model in DistributedDataParallel can't be estimated: estimate the model without it (its attribute "
    "`module`), and add the bytes of all gradients for its buckets, unless gradient_as_bucket_view=True; or "
    "pass ranks= (`memlog estimate --ranks`), and wrap the model in the function that makes it"
)
_SHARDED: Final = (
    "a model that torch.distributed shards (fully_shard, FullyShardedDataParallel, DTensor), and other calls "
    "of torch.distributed, need the other processes, but an estimate runs in one process: estimate the model "
    "without them, which gives the memory without sharding, or pass ranks= (`memlog estimate --ranks`), and "
    "shard the model in the function that makes it"
)
_FSDP1: Final = (
    "a model in FullyShardedDataParallel (FSDP1) can't be estimated: shard it with "
    "torch.distributed.fsdp.fully_shard (FSDP2)"
)
_VALUES: Final = (
    "this call of torch.distributed needs values from other ranks, which an estimate does not have: leave it "
    "out for the estimate; make the stages of a pipeline in the function that `memlog estimate` calls"
)
_TORCH: Final = Path(torch.__file__).parent


_ranks: int | None = None
"""Number of ranks of the present estimate; ``None``: it has one process."""


@contextmanager
def one_of(ranks: int | None, mode: FakeMode, rank: int = 0) -> Iterator[None]:
    """Let the program inside the block be one rank, if there are several (`memlog.estimates.ranks`).

    Raises:
        ConfigurationError: ``ranks`` is no whole number above 0, or torch is another version.
    """
    global _ranks  # noqa: PLW0603 - messages about errors name it
    if ranks is None:
        yield
        return
    if type(ranks) is not int or ranks < 1:
        raise ConfigurationError(
            f"ranks={ranks!r:.100}: write the number of processes, a whole number above 0"
        )
    try:
        from memlog.estimates.ranks import one_rank_of  # noqa: PLC0415 - it takes half a second
    except ImportError as error:
        raise ConfigurationError(
            f"torch {torch.__version__} can't be one rank of several in an estimate ({error}): install 2.13"
        ) from error

    with one_rank_of(ranks, mode, rank):
        before, _ranks = _ranks, ranks
        try:
            yield
        finally:
            _ranks = before


def is_distributed(tensor: Tensor) -> bool:
    """Return True for a `torch.distributed.tensor.DTensor`."""
    # Loading this module takes time. If the program has not loaded it, there are no such tensors.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def part_of(tensor: Any) -> Tensor:
    """Return a rank's part of a distributed tensor, or the tensor itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[no-any-return]


def refuse_several_processes(model: nn.Module, ranks: int | None) -> None:
    """Raise if torch distributes a model over processes, unless the estimate is for several ranks.

    Raises:
        ConfigurationError: A part of the model is such a model, or is in FSDP1.
    """
    for module in model.modules():
        homes = [base.__module__ for base in type(module).__mro__]
        if ranks is not None:
            if "torch.distributed.fsdp.fully_sharded_data_parallel" in homes:
                raise ConfigurationError(_FSDP1)
            continue
        if "torch.nn.parallel.distributed" in homes:
            raise ConfigurationError(_REPLICATED)
        if any(home.startswith("torch.distributed.") for home in homes):
            raise ConfigurationError(_SHARDED)
    if ranks is None and any(is_wrapper(type(parameter)) for parameter in model.parameters()):
        raise ConfigurationError(_SHARDED)


def needs_other_processes(error: BaseException) -> str | None:
    """Return why an error came from a call that needs other processes; ``None`` if it did not."""
    paths = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    is_replicated = _TORCH / "nn" / "parallel" / "distributed.py" in paths
    if not is_replicated and not any(path.is_relative_to(_TORCH / "distributed") for path in paths):
        return None
    if not _ranks:
        return _REPLICATED if is_replicated else _SHARDED
    is_bad_call = isinstance(error, (AssertionError, RuntimeError, ValueError))
    if is_bad_call and not isinstance(error, DataDependentOutputException):
        first, *_ = str(error).splitlines() or [type(error).__name__]
        return f"torch.distributed refuses this call in an estimate for {_ranks} ranks: {first}"
    return _VALUES
