"""Buffers of operations on lists of tensors on CUDA.

Source: ``ForeachReduceOp.cu`` in torch's ``aten/src/ATen/native/cuda``.
"""

from __future__ import annotations

from typing import Final

import torch

from memlog.estimates.cuda_kernels.call import NONE, Blocks, Call, Temporaries, around_results

_CHUNK: Final = 65_536
"""Number of values of a tensor that one block of threads reduces."""
_HALF: Final = (torch.float16, torch.bfloat16)


def _norms(call: Call) -> Blocks:
    tensors = call["self"]
    if not tensors:
        return NONE
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    dtype = tensors[0].dtype
    return around_results(len(tensors) * chunks * (4 if dtype in _HALF else dtype.itemsize))


TEMPORARIES: Final[dict[str, Temporaries]] = dict.fromkeys(
    ("_foreach_norm", "_foreach_max", "_foreach_powsum"), _norms
)
