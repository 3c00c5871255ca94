"""Replacement of a program's CUDA devices by the CPU.

An estimate traces operations on the CPU, even if the program names a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def all_on_cpu() -> Iterator[None]:
    """Make every tensor on the CPU inside the block, even if the program names a CUDA device."""
    default = torch.get_default_device()
    with (
        nullcontext() if default.type == "cpu" else torch.device("cpu"),
        _OnCpu(),
        patch.object(nn.Module, "_apply", _convert),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
    ):
        yield


class _OnCpu(TorchFunctionMode):
    """Mode that replaces CUDA devices by the CPU among the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return func(*args)  # most calls only read a property of a tensor, such as its shape
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        given = [_on_cpu(value) for value in args]
        if func is torch.device and (given, named) != (list(args), kwargs or {}):
            return torch.device("cpu")
        if func is Tensor.to and len(given) > 1 and type(given[1]) is int:
            given[1] = "cpu"  # the integer was the number of a CUDA device
        return func(*given, **named)


def _on_cpu(value: Any) -> Any:
    is_name = isinstance(value, (str, torch.device))
    return "cpu" if is_name and str(value).partition(":")[0] == "cuda" else value


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Apply ``fn`` to a module's tensors. This replaces ``Module._apply``, which refuses fake parameters."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = fn(parameter.data)
            if parameter.grad is not None:
                parameter.grad = fn(parameter.grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module
