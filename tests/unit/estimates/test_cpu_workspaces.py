"""Workspaces of operations on the CPU: estimated on fake tensors, against the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from memlog.estimates.cpu_workspaces import measured_on_small_batches
from memlog.estimates.fake_mode import FakeMode
from memlog.tracer.engines import op_workspace

aten = torch.ops.aten
BFLOAT16 = torch.bfloat16
SHAPES = [(40, 1200, 600), (900, 64, 1500), (1500, 2600, 40)]
LAYOUTS = ["rows", "columns", "expanded", "every second", "part of a row"]
BLOCKS = 65536 if not torch.cpu._is_amx_tile_supported() else 4 * 65536
"""Bytes by which oneDNN's choice of blocks differs between a half-precision matrix and a smaller one. A
processor with AMX has larger blocks."""


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor whose channels are its innermost dimension."""
    return zeros(*shape, dtype=dtype).to(memory_format=torch.channels_last)


def swapped(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    *outer, a, b = shape
    return zeros(*outer, b, a, dtype=dtype).transpose(-1, -2)


ONES, NONE = [1, 1], [0, 0]
ALL = [True] * 3
Made = tuple[Any, ...]
OPERATIONS: dict[str, Callable[[int], Made]] = {
    "fold": lambda n: (aten.col2im, swapped(n, 144, 784), [28, 28], [3, 3], ONES, ONES, ONES),
    "unfold": lambda n: (aten.im2col, zeros(n, 16, 28, 28), [3, 3], ONES, ONES, ONES),
    "softmax": lambda n: (aten._softmax, swapped(n, 90, 80), -1, False),
    "softmax, backward": lambda n: (
        aten._softmax_backward_data, swapped(n, 90, 80), zeros(n, 90, 80), -1, torch.float32,
    ),
    "softmax over channels": lambda n: (aten._log_softmax, last(n, 12, 30, 30), 1, False),
    "logsumexp": lambda n: (aten.logsumexp, zeros(n, 70, 80), [1], True),
    "mean of bfloat16": lambda n: (aten.mean.dim, swapped(n, 60, 70, dtype=BFLOAT16), [1]),
    "sum of expanded": lambda n: (aten.sum.dim_IntList, zeros(n, 1, 64).expand(n, 70, 64), [0]),
    "layer norm": lambda n: (
        aten.native_layer_norm, swapped(n, 50, 64), [64], zeros(64), zeros(64), 1e-5,
    ),
    "layer norm, backward": lambda n: (
        aten.native_layer_norm_backward, swapped(n, 50, 64), zeros(n, 50, 64), [64],
        zeros(n, 50, 1), zeros(n, 50, 1), zeros(64), zeros(64), ALL,
    ),
    "group norm, backward": lambda n: (
        aten.native_group_norm_backward, zeros(n, 32, 16, 16), zeros(n, 32, 16, 16),
        zeros(n, 4), zeros(n, 4), zeros(32), n, 32, 256, 4, ALL,
    ),
    "batch norm of two types, backward": lambda n: (
        aten.native_batch_norm_backward, last(n, 16, 20, 20, dtype=BFLOAT16),
        last(n, 16, 20, 20, dtype=BFLOAT16), *(zeros(16) for _ in range(5)), True, 1e-5, ALL,
    ),
    "gelu, backward": lambda n: (aten.gelu_backward, swapped(n, 50, 60), zeros(n, 50, 60)),
    "roll": lambda n: (aten.roll, zeros(n, 12, 12, 16), [-2, -2], [1, 2]),
    "average pool, backward": lambda n: (
        aten.avg_pool2d_backward, last(n, 12, 12, 12), zeros(n, 12, 24, 24), [2, 2], [], NONE,
        False, True, None,
    ),
    "max pool, backward": lambda n: (
        aten.max_pool2d_with_indices_backward, last(n, 12, 12, 12), zeros(n, 12, 24, 24), [2, 2],
        [], NONE, ONES, False, zeros(n, 12, 12, 12, dtype=torch.int64),
    ),
    "nearest": lambda n: (aten.upsample_nearest2d, zeros(n, 12, 20, 20), [40, 40]),
    "bilinear, backward": lambda n: (
        aten.upsample_bilinear2d_backward, zeros(n, 12, 40, 40), [40, 40], [n, 12, 20, 20], False,
    ),
    "sum of a slice of no values": lambda n: (aten.sum.dim_IntList, zeros(n, 64)[:, :0], [1]),
    "affine grid": lambda n: (aten.affine_grid_generator, zeros(n, 2, 3), [n, 1, 28, 28], False),
    "embedding, backward": lambda n: (
        aten.embedding_dense_backward, zeros(30, n, 32).transpose(0, 1),
        zeros(n, 30, dtype=torch.int64), 100, -1, False,
    ),
    "attention": lambda n: (
        aten._scaled_dot_product_flash_attention_for_cpu,
        *(zeros(n, 2, 40, 16, dtype=BFLOAT16) for _ in range(3)),
    ),
    "distances": lambda n: (aten._euclidean_dist, zeros(n, 32), zeros(300, 32)),
    "convolution": lambda n: (
        aten.convolution, zeros(n, 12, 24, 24), zeros(24, 12, 3, 3), zeros(24), ONES, ONES, ONES,
        False, NONE, 1,
    ),
    "convolution, channels last": lambda n: (
        aten.convolution_backward, last(n, 24, 24, 24, dtype=BFLOAT16),
        last(n, 12, 24, 24, dtype=BFLOAT16), last(24, 12, 3, 3, dtype=BFLOAT16), [24], ONES, ONES,
        ONES, False, NONE, 1, ALL,
    ),
    "convolution of points": lambda n: (
        aten.convolution, zeros(n, 12, 30, 30), zeros(5, 12, 1, 1), None, ONES, NONE, ONES, False,
        NONE, 1,
    ),
    "convolution of points, backward": lambda n: (
        aten.convolution_backward, zeros(n, 5, 300), zeros(n, 12, 300), zeros(5, 12, 1), [5], [1],
        [0], [1], False, [0], 1, ALL,
    ),
    "transposed convolution, backward": lambda n: (
        aten.convolution_backward, zeros(n, 64, 8, 8), zeros(n, 128, 4, 4), zeros(128, 64, 4, 4),
        [64], [2, 2], ONES, ONES, True, NONE, 1, ALL,
    ),
    "products of bfloat16": lambda n: (
        aten.bmm, zeros(n, 3, 60, 50, dtype=BFLOAT16)[:, 1], swapped(n, 50, 70, dtype=BFLOAT16),
    ),
    "products of expanded matrices": lambda n: (
        aten.bmm, zeros(n, 60, 1).expand(n, 60, 50), swapped(n, 50, 70),
    ),
    "products with one bias": lambda n: (
        aten.baddbmm, zeros(1), zeros(n, 60, 50), swapped(n, 50, 70),
    ),
    "absolute values": lambda n: (aten.abs, zeros(n, 100, 30, dtype=torch.complex64)),
    "a sum of two types": lambda n: (
        aten.add.Tensor, zeros(n, 50, 60), zeros(n, 50, 60, dtype=BFLOAT16),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # decides which library computes 1x1 convolutions
    yield
    torch.set_num_threads(threads)


def inside(made: Made) -> int:
    """Return the bytes that an operation takes inside itself."""
    func, *args = made
    func = getattr(func, "default", func)
    found = op_workspace.run(func, args, {})[1]
    assert found is not None
    return found.peak - found.kept


def estimated(make: Callable[[], Made]) -> int:
    with FakeMode(), measured_on_small_batches():
        return inside(make())


@pytest.mark.parametrize("batch", [3, 100])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_operations_take_is_what_the_allocator_says(name: str, batch: int) -> None:
    real = inside(OPERATIONS[name](batch))
    assert estimated(lambda: OPERATIONS[name](batch)) == pytest.approx(real, rel=0.02, abs=4096)


def matrix(rows: int, columns: int, layout: str, dtype: torch.dtype) -> Tensor:
    if layout == "columns":
        return swapped(rows, columns, dtype=dtype)
    if layout == "expanded":
        return zeros(1, columns, dtype=dtype).expand(rows, columns)
    if layout == "every second":
        return zeros(rows, 2 * columns, dtype=dtype)[:, ::2]
    if layout == "part of a row":
        return zeros(rows, 3 * columns, dtype=dtype)[:, :columns]
    return zeros(rows, columns, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sides", SHAPES, ids=str)
def test_what_products_take_is_what_the_allocator_says(
    sides: tuple[int, int, int], layout: str, dtype: torch.dtype
) -> None:
    rows, inner, columns = sides
    beside = BLOCKS if dtype is BFLOAT16 else 0

    def first() -> Made:
        return aten.mm, matrix(rows, inner, layout, dtype), zeros(inner, columns, dtype=dtype)

    def second() -> Made:
        left = zeros(rows, inner, dtype=dtype)
        return aten.addmm, zeros(columns, dtype=dtype), left, matrix(inner, columns, layout, dtype)

    for make in (first, second):
        real = inside(make())
        assert estimated(make) == pytest.approx(real, rel=0.02, abs=beside)


def test_what_attention_with_a_mask_takes_is_what_the_allocator_says() -> None:
    def attend(batch: int) -> int:
        queries = [zeros(batch, 2, 90, 16) for _ in range(3)]
        func = aten._scaled_dot_product_flash_attention_for_cpu.default
        found = op_workspace.run(func, queries, {"attn_mask": zeros(batch, 1, 90, 90)})[1]
        assert found is not None
        return found.peak - found.kept

    real = attend(40)
    with FakeMode(), measured_on_small_batches():
        assert attend(40) == pytest.approx(real, rel=0.02)


def test_measuring_uses_up_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    estimated(lambda: (aten.native_dropout, zeros(50, 60), 0.1, True))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_does_not_work_with_zeros_is_not_known() -> None:
    with FakeMode(), measured_on_small_batches():
        assert op_workspace.run(aten.linalg_inv_ex.default, (zeros(3, 3),), {})[1] is not None
        assert op_workspace.run(aten.multinomial.default, (zeros(3, 3), 2), {})[1] is None


def test_sparse_tensors_are_not_measured_as_dense_ones() -> None:
    def multiply() -> op_workspace.Workspace | None:
        edges = torch.zeros(2, 64, dtype=torch.int64)
        graph = torch.sparse_coo_tensor(edges, zeros(64), (3000, 3000), check_invariants=False)
        return op_workspace.run(aten.mm.default, (graph, zeros(3000, 8)), {})[1]

    with FakeMode(), measured_on_small_batches():
        assert multiply() is None
