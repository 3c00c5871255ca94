"""Refusal of models and calls that need the other processes of a distributed training."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

import torch
from torch import nn

from memlog.errors import ConfigurationError
from memlog.tracer.tensor_storages import is_wrapper

_REPLICATED: Final = (
    "a model in DistributedDataParallel can't be estimated: estimate the model without it (its attribute "
    "`module`), and add the bytes of all gradients for its buckets, unless gradient_as_bucket_view=True"
)
_SHARDED: Final = (
    "a model that torch.distributed shards (fully_shard, FullyShardedDataParallel, DTensor), and other calls "
    "of torch.distributed, need the other processes, but an estimate runs in one process: estimate the model "
    "without them, which gives the memory without sharding"
)
_TORCH: Final = Path(torch.__file__).parent


def refuse_several_processes(model: nn.Module) -> None:
    """Raise if torch distributes a model over processes.

    Raises:
        ConfigurationError: A part of the model is such a model.
    """
    for module in model.modules():
        homes = [each.__module__ for each in type(module).__mro__]
        if "torch.nn.parallel.distributed" in homes:
            raise ConfigurationError(_REPLICATED)
        if any(home.startswith("torch.distributed.") for home in homes):
            raise ConfigurationError(_SHARDED)
    if any(is_wrapper(type(each)) for each in model.parameters()):
        raise ConfigurationError(_SHARDED)


def needs_other_processes(error: BaseException) -> str | None:
    """Return why an error came from a call that needs other processes; ``None`` if it did not."""
    paths = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if _TORCH / "nn" / "parallel" / "distributed.py" in paths:
        return _REPLICATED
    if any(path.is_relative_to(_TORCH / "distributed") for path in paths):
        return _SHARDED
    return None
