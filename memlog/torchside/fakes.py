"""Private parts of torch that estimates need: fake tensors, modes, autocast's keys, trees of tensors.

This module is imported by estimates alone. If one of its parts is missing, the import says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import init
from torch.optim import optimizer
from torch.utils.data import dataloader

from memlog.errors import ConfigurationError

try:
    from torch import _VF as PACKING
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
        in_kernel_invocation_manager,
    )
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves, tree_map_only

    make_subclass = Tensor._make_subclass
    trunc_normal = init._no_grad_trunc_normal_
    LoaderIterator = dataloader._BaseDataLoaderIter
    _foreach_types = optimizer._foreach_supported_types
    below_autograd = torch._C._AutoDispatchBelowAutograd
    without_dispatch = torch._C._DisableTorchDispatch
    parse_to = torch._C._nn._parse_to
    plain_subclass: Any = torch._C._disabled_torch_function_impl
    _warn_no_more = torch._C._set_warn_deprecated_on_mutable_data_ptr
    _operations = torch._C._dispatch_get_all_op_names
    _excluded = torch._C._ExcludeDispatchKeyGuard
except (ImportError, AttributeError) as error:
    raise ConfigurationError(
        f"torch {torch.__version__} has changed what estimates need ({error}): use torch 2.6 to 2.13, or a "
        "newer version of memlog"
    ) from error

__all__ = [
    "PACKING",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "LoaderIterator",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "below_autograd",
    "in_kernel_invocation_manager",
    "make_subclass",
    "parse_to",
    "plain_subclass",
    "tree_leaves",
    "tree_map_only",
    "trunc_normal",
    "without_dispatch",
]

FAKES_FOLDER: Final = "_subclasses"
"""Folder of torch's code for fake tensors."""


def without_modes() -> AbstractContextManager[Any]:
    """Inside the block, no dispatch mode of this thread is active."""
    return _disable_current_modes()


def without_autocast_on_cpu() -> AbstractContextManager[Any]:
    """Inside the block, autocast on the CPU converts no arguments."""
    return _excluded(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def operations() -> Iterator[str]:
    """Yield the names of ATen's operations, such as ``aten::add.Tensor``."""
    return (name for name in _operations() if name.startswith("aten::"))


def allow_reading_the_address(fake: Tensor) -> None:
    """Let a program read the address of a fake tensor without a warning, as it can with a real one."""
    _warn_no_more(fake)


def other_trunc_normal(fill: Callable[..., Tensor]) -> AbstractContextManager[Any]:
    """Inside the block, ``fill`` draws truncated normal values in place of torch's `trunc_normal`."""
    return patch.object(init, "_no_grad_trunc_normal_", fill)


def foreach_for(kind: type) -> AbstractContextManager[Any]:
    """Inside the block, optimizers step tensors of the class ``kind`` together, as they do on a GPU."""
    return patch.object(optimizer, "_foreach_supported_types", [*_foreach_types, kind])
