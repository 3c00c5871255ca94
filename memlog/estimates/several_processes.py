"""Models and calls that need the other processes of a distributed training."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from memlog.errors import ConfigurationError
from memlog.estimates.fake_mode import FakeMode
from memlog.tracer.tensor_storages import is_wrapper

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
    """Let the program inside the block be one rank, if there are several (`memlog.estimates.one_rank`).

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
        from memlog.estimates.one_rank import one_rank_of  # noqa: PLC0415 - it takes half a second
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
        homes = [each.__module__ for each in type(module).__mro__]
        if ranks is not None:
            if "torch.distributed.fsdp.fully_sharded_data_parallel" in homes:
                raise ConfigurationError(_FSDP1)
            continue
        if "torch.nn.parallel.distributed" in homes:
            raise ConfigurationError(_REPLICATED)
        if any(home.startswith("torch.distributed.") for home in homes):
            raise ConfigurationError(_SHARDED)
    if ranks is None and any(is_wrapper(type(each)) for each in model.parameters()):
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
