"""Reading of tensors without running a subclass's code, and oneDNN's switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

TensorBase: Any = torch._C.TensorBase
"""Class of all tensors. Its attributes are read by torch itself, also for a subclass that replaces them."""
DisableTorchFunction: Any = torch._C.DisableTorchFunction
"""Context in which no ``__torch_function__`` runs, nor a mode of functions."""
DisableTorchFunctionSubclass: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which no ``__torch_function__`` of a subclass runs."""
OPAQUE_LAYOUT: Final[Any] = getattr(torch, "_mkldnn", None)
"""Layout of oneDNN's tensors, whose storage can't be read."""
onednn_enabled: Callable[[], bool] = getattr(torch._C, "_get_mkldnn_enabled", lambda: True)
"""Function that returns whether operations may use oneDNN."""
set_onednn_enabled: Callable[[bool], object] = getattr(
    torch._C, "_set_mkldnn_enabled", lambda _: None
)
"""Function that takes whether operations may use oneDNN."""


def has_kernel(operation: str, key: str) -> bool:
    """Return whether an operation, such as ``aten::add.Tensor``, has a kernel for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))
