"""Private parts of torch with which an estimate runs one rank of a training on several devices."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch

from memlog.errors import ConfigurationError

try:
    from torch.distributed.device_mesh import _get_device_handle
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    WAIT: Final = torch.ops._c10d_functional.wait_tensor.default
    """Operation that waits for a collective."""
except (ImportError, AttributeError) as error:
    raise ConfigurationError(
        f"torch {torch.__version__} lacks what estimates with ranks= need ({error}): use torch 2.13, or a "
        "newer version of memlog"
    ) from error

__all__ = ["ShardingPropagator"]
_USE_DEVICES: Final = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_init",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed.tensor._random",
)
"""Modules that ask for the functions of a device, such as its streams."""
_MAKE_MESHES: Final = (
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.fsdp._fully_shard._fully_shard",
)


def fake_store() -> Any:
    """Return the store of a fake process group, whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers the backend

    return FakeStore()


@contextmanager
def cuda_functions(device: Any) -> Iterator[None]:
    """Inside the block, the wrappers for several ranks take ``device`` for the module ``torch.cuda``."""
    with ExitStack() as undo:
        for name in _USE_DEVICES:
            undo.enter_context(
                patch.object(
                    importlib.import_module(name),
                    "_get_device_handle",
                    lambda kind: device if kind == "cuda" else _get_device_handle(kind),
                )
            )
        yield


@contextmanager
def default_mesh(make: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, a model that is sharded without a mesh gets the one that ``make`` returns."""
    with ExitStack() as undo:
        for name in _MAKE_MESHES:
            undo.enter_context(
                patch.object(importlib.import_module(name), "_init_default_mesh", make)
            )
        yield


def chunks_of_parameters(chunks: Callable[..., Any]) -> Any:
    """Return the context in which FSDP cuts parameters into parts by the function ``chunks``."""
    return patch.object(_fsdp_param, "_chunk_with_empty", chunks)


def each_layout_once() -> Any:
    """Return the context in which DTensor finds the layouts of equal tensors of an operation's lists once.

    torch finds them for each tensor, and looks at all tensors for each: the step of an optimizer took a time
    quadratic in the number of parameters.
    """
    name = "propagate_op_sharding_non_cached"
    of_all = getattr(ShardingPropagator, name)

    @functools.wraps(of_all)
    def of_different(self: Any, schema: Any) -> Any:
        args = schema.args_schema
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        by_tensor = list(zip(*lists, strict=False))
        are_equal_long = all(len(each) == len(by_tensor) for each in lists)
        if not schema.op.name().startswith("aten::_foreach_") or not are_equal_long:
            return of_all(self, schema)
        numbers: dict[Any, int] = {}
        number_of = [numbers.setdefault(_layouts(values), len(numbers)) for values in by_tensor]
        firsts = [number_of.index(number) for number in numbers.values()]
        of_firsts = copy.copy(schema)
        of_firsts.args_schema = tuple(
            type(arg)(arg[at] for at in firsts) if isinstance(arg, (list, tuple)) else arg
            for arg in args
        )
        found = of_all(self, of_firsts)
        if found.needs_redistribute:  # the answer has the arguments of all tensors
            return of_all(self, schema)
        if found.output_spec is not None:
            kind = type(found.output_spec)
            found.output_spec = kind(found.output_spec[number] for number in number_of)
        return found

    return patch.object(ShardingPropagator, name, of_different)


def _layouts(values: Any) -> Any:
    """Return what decides the layout of a result. Numbers decide by their types alone."""
    return tuple(
        value if isinstance(value, DTensorSpec) or value is None else type(value)
        for value in values
    )
