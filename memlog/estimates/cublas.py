"""Workspaces of cuBLAS, which torch takes from its caching allocator.

Each handle of cuBLAS has a workspace for each stream. torch allocates it at the handle's first product, and
keeps it. Each thread has a handle of its own. A step that runs on one stream uses two: that of the thread
that calls it, and that of autograd's thread for the device. cuBLASLt uses the same workspaces. Source:
``aten/src/ATen/cuda/CublasHandlePool.cpp`` (torch 2.13).
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

import torch
from torch import Tensor

from memlog.estimates.cuda_kernels.gpu import Gpu
from memlog.estimates.places import DEVICE, Places
from memlog.tracer import torch_private

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
        if torch_private.operation_name(func).rstrip("_") not in _PRODUCTS or not self._size:
            return ()
        backward = torch_private.backward_task() != torch_private.NO_TASK
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
