"""Types of results under autocast: those in an estimate are those of a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memlog.estimates.as_on_cuda import as_on_cuda
from memlog.estimates.cuda_kernels.reductions import A100
from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.places import Places

pytestmark = pytest.mark.cuda


def operations(device: str) -> dict[str, Callable[[], Tensor]]:
    def full(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    image, half = full(4, 8, 8, 8).bfloat16(), full(8, 8).bfloat16()
    wide, float16 = full(8, 8), full(8, 8).half()
    classes = torch.zeros(8, dtype=torch.long, device=device)
    places = classes.expand(8, 8).contiguous()
    return {
        "linear": lambda: functional.linear(wide, wide),
        "addmm": lambda: torch.addmm(wide, wide, wide),
        "bmm": lambda: torch.bmm(wide[None], wide[None]),
        "mv": lambda: torch.mv(wide, wide[0]),
        "dot": lambda: torch.dot(wide[0], wide[0]),
        "outer": lambda: torch.outer(wide[0], wide[0]),
        "einsum": lambda: torch.einsum("ij,jk->ik", wide, wide),
        "conv2d": lambda: functional.conv2d(full(1, 8, 4, 4), full(4, 8, 3, 3)),
        "conv_transpose2d": lambda: functional.conv_transpose2d(full(1, 8, 4, 4), full(8, 4, 3, 3)),
        "attention": lambda: functional.scaled_dot_product_attention(
            *(full(1, 2, 8, 8) for _ in range(3))
        ),
        "GRUCell": lambda: nn.GRUCell(8, 8, device=device)(wide),
        "LSTMCell": lambda: nn.LSTMCell(8, 8, device=device)(wide)[0],
        "bilinear": lambda: functional.bilinear(half, half, full(3, 8, 8)),
        "layer_norm": lambda: functional.layer_norm(half, (8,)),
        "rms_norm": lambda: functional.rms_norm(half, (8,)),
        "group_norm": lambda: functional.group_norm(image, 2),
        "batch_norm": lambda: functional.batch_norm(image, None, None, training=True),
        "normalize": lambda: functional.normalize(half),
        "softmax": lambda: torch.softmax(half, -1),
        "softmax of float16": lambda: torch.softmax(float16, -1),
        "softmax to float32": lambda: torch.softmax(float16, -1, dtype=torch.float32),
        "log_softmax to bfloat16": lambda: functional.log_softmax(half, -1, dtype=torch.bfloat16),
        "cross_entropy": lambda: functional.cross_entropy(half, classes),
        "cross_entropy of probabilities": lambda: functional.cross_entropy(half, half),
        "nll_loss": lambda: functional.nll_loss(half, classes),
        "mse_loss": lambda: functional.mse_loss(half, wide),
        "smooth_l1_loss": lambda: functional.smooth_l1_loss(half, wide),
        "kl_div": lambda: functional.kl_div(half, half, reduction="batchmean"),
        "binary_cross_entropy": lambda: functional.binary_cross_entropy_with_logits(half, wide),
        "cosine_similarity": lambda: functional.cosine_similarity(half, half),
        "sum": half.sum,
        "sum of rows": lambda: half.sum(0),
        "mean": half.mean,
        "var": half.var,
        "prod": half.prod,
        "prod of rows": lambda: half.prod(0),
        "cumsum": lambda: half.cumsum(0),
        "norm": lambda: torch.norm(half),
        "norm of rows": lambda: half.norm(2, -1, True),
        "norm by name": lambda: torch.norm(half, dim=1),
        "vector_norm": lambda: torch.linalg.vector_norm(half),
        "matrix_norm": lambda: torch.linalg.matrix_norm(half),
        "logsumexp": lambda: half.logsumexp(0),
        "cdist": lambda: torch.cdist(half, half),
        "dist": lambda: torch.dist(half, half),
        "square": lambda: half**2,
        "exp": half.exp,
        "acos": half.acos,
        "tanh": half.tanh,
        "gelu": lambda: functional.gelu(half),
        "prelu": lambda: functional.prelu(half, full(1)),
        "nearest": lambda: functional.interpolate(image, scale_factor=2),
        "bilinear image": lambda: functional.interpolate(image, scale_factor=2, mode="bilinear"),
        "grid_sample": lambda: functional.grid_sample(image, full(4, 8, 8, 2), align_corners=False),
        "avg_pool3d": lambda: functional.avg_pool3d(image[None], 2),
        "reflection": lambda: functional.pad(image, (1, 1, 1, 1), mode="reflect"),
        "cat": lambda: torch.cat([half, wide]),
        "stack": lambda: torch.stack([half, half]),
        "addcmul": lambda: torch.addcmul(half, wide, wide),
        "scatter_add": lambda: torch.scatter_add(wide, 0, places, half),
        "index_copy": lambda: wide.index_copy(0, classes[:1], wide[:1]),
        "embedding": lambda: functional.embedding(places, wide),
    }


def types(device: str) -> dict[str, torch.dtype]:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return {name: run().dtype for name, run in operations(device).items()}


def test_autocast_converts_as_on_the_device() -> None:
    with FakeMode(), as_on_cuda(A100, Places()):
        estimated = types("cpu")
    assert estimated == types("cuda")


def test_after_an_estimate_autocast_on_the_cpu_is_as_before() -> None:
    def loss() -> Any:
        half = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.cross_entropy(
                half, torch.zeros(8, dtype=torch.long)
            ).dtype, half.exp().dtype

    before = loss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with as_on_cuda(A100, Places()):
            pass
    assert loss() == before
