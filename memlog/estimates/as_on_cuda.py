"""Imitation of operations on a CUDA device, for fake tensors that lie on the CPU.

A build of torch without CUDA can't record a backward pass of tensors on a CUDA device, not even of fake ones.
So an estimate runs on the CPU. Some operations keep different tensors on the two devices. memlog makes these
operations behave as on a CUDA device:

* dropout keeps its mask, with one byte for each value (``aten::native_dropout``);
* attention runs the fused kernel that torch chooses on the device, and keeps what this kernel keeps;
* autocast computes in the types of `memlog.estimates.autocast_on_cuda`;
* group normalisation keeps a contiguous copy of its input;
* batch normalisation by cuDNN keeps a contiguous copy of its input;
* convolutions return tensors in the layouts of cuDNN (`memlog.estimates.convolution_layouts`);
* cuBLAS keeps its workspaces (`memlog.estimates.cublas`);
* optimizers update all parameters at once (``foreach``), which takes a temporary copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

from memlog.estimates import autocast_on_cuda, convolution_layouts
from memlog.estimates.attention_on_cuda import attention_on
from memlog.estimates.cells_on_cuda import gru_cell, lstm_cell
from memlog.estimates.ctc_of_lists import ctc_loss
from memlog.estimates.cublas import Cublas
from memlog.estimates.cuda_kernels.gpu import Gpu
from memlog.estimates.cuda_kernels.layers import by_cudnn
from memlog.estimates.cuda_workspaces import computed_from_shapes
from memlog.estimates.places import Places
from memlog.estimates.renorm_on_cuda import renorm
from memlog.estimates.rms_norm_on_cuda import rms_norm
from memlog.tracer.engines.cpu import live_storages, patches, storage_events

_FOREACH_DEVICES = "_get_foreach_kernels_supported_devices"


@contextmanager
def as_on_cuda(gpu: Gpu, places: Places) -> Iterator[None]:
    """Make operations of this process behave as on a CUDA device inside the block.

    Traces leave out tensors that ``places`` finds on the host.
    """
    library = torch.library.Library("aten", "IMPL")
    types = [*torch_optimizer._foreach_supported_types, FakeTensor]
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # oneDNN's LSTM keeps memory that no tensor shows
    try:
        library.impl("batch_norm", _batch_norm, "AutogradCPU")
        library.impl("group_norm", _group_norm, "AutogradCPU")
        library.impl("ctc_loss.IntList", ctc_loss, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("renorm", renorm, "AutogradCPU")
        library.impl("rms_norm", rms_norm, "AutogradCPU")
        library.impl("gru_cell", gru_cell, "AutogradCPU")
        library.impl("lstm_cell", lstm_cell, "AutogradCPU")
        library.impl("scaled_dot_product_attention", attention_on(gpu), "AutogradCPU")
        for name in ("softmax", "log_softmax"):
            library.impl(f"{name}.int", _softmax(name), "AutogradCPU")
        autocast_on_cuda.register(library)
        with (
            patch.object(torch.autocast, "__init__", _autocast_on_cpu(torch.autocast.__init__)),
            patch.object(torch_optimizer, "_foreach_supported_types", types),
            patch.object(torch_optimizer, _FOREACH_DEVICES, lambda: ["cpu", "cuda"]),
            computed_from_shapes(gpu),
            convolution_layouts.of_cudnn(),
            live_storages.placed_by(places),
            storage_events.counted(Cublas(gpu, places)),
            patches.RANDOM_STATE_COPIES.without_listeners(),  # they lie on the host
        ):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        library._destroy()


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(tensor, p, train)[0] if train and p else tensor


def _batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _: bool,
) -> Tensor:
    """Return what ``_batch_norm_impl_index`` returns. cuDNN gets, and keeps, a contiguous copy."""
    if by_cudnn(values, weight, trains=training):
        values = values.contiguous(memory_format=convolution_layouts.suggested(values))
    arguments = (values, weight, bias, mean, variance, training, momentum, eps)
    out: Tensor = torch.ops.aten.native_batch_norm(*arguments)[0]
    return out


def _group_norm(
    values: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: bool = True,
) -> Tensor:
    shape = (values.shape[0], values.shape[1], prod(values.shape[2:]), groups)
    arguments = (values.contiguous(), weight, bias, *shape, eps)
    out: Tensor = torch.ops.aten.native_group_norm(*arguments)[0]
    return out


def _softmax(name: str) -> Callable[..., Tensor]:
    """Return ``softmax`` or ``log_softmax``. The kernel for float16 can return float32 without a copy."""
    operation = getattr(torch.ops.aten, f"_{name}").default

    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        inside = tensor.dtype is torch.float16 and dtype is torch.float32
        if dtype is not None and not inside:
            tensor = tensor.to(dtype)
        result: Tensor = operation(tensor, dim, inside)
        return result

    return kernel


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return on_cpu
