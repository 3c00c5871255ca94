"""Sizes of buffers inside CUDA operations. The expected sizes were measured on torch's allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memlog.errors import ConfigurationError
from memlog.estimates import cuda_workspaces, gpus
from memlog.estimates.cuda_kernels import sorting
from memlog.estimates.cuda_kernels.reductions import A100, Gpu, reduction
from memlog.tracer.engines.op_workspace import RESULTS

H100 = Gpu("H100", (9, 0), 132, 2048)
T4 = Gpu("T4", (7, 5), 40, 1024)
aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def blocks(gpu: Gpu, func: Any, *args: Any, **kwargs: Any) -> list[int]:
    """Return the buffers of an operation, without the place of its results."""
    out = func(*args, **kwargs)
    found = cuda_workspaces.workspace(gpu, func, args, kwargs, out)
    assert found is not None
    return [size for size in found.blocks or () if size != RESULTS]


@pytest.mark.parametrize(
    ("gpu", "rows", "columns", "dtype", "sizes"),
    [
        (A100, 2048, 4096, torch.float32, [67108864, 128]),
        (A100, 2048, 4096, torch.bfloat16, [67108864, 128]),
        (A100, 2048, 1000, torch.float32, [16384000, 32]),
        (A100, 512, 4096, torch.float32, []),
        (A100, 4096, 129, torch.float32, [264192, 20]),
    ],
)
def test_sums_over_rows(
    gpu: Gpu, rows: int, columns: int, dtype: torch.dtype, sizes: list[int]
) -> None:
    found = blocks(gpu, aten.sum.dim_IntList, meta(rows, columns, dtype=dtype), [0])
    assert found == [*sizes, *(-size for size in reversed(sizes))]


def test_the_gpu_decides_the_number_of_partial_sums() -> None:
    sizes = {
        gpu.name: blocks(gpu, aten.sum.default, meta(10_000_000))[0] for gpu in (A100, H100, T4)
    }
    assert sizes == {"A100": 1728, "H100": 2112, "T4": 320}


def test_a_sum_of_booleans_converts_them_first() -> None:
    assert blocks(A100, aten.sum.default, meta(8192, dtype=torch.bool)) == [65536, -65536]


def test_dimensions_in_the_order_in_which_they_lie_in_memory() -> None:
    walk = reduction((4, 8, 16), (1, 64, 4), (0, 2), itemsize=4, result_itemsize=4)
    assert walk.shape == (64, 8)
    assert walk.strides == (4, 256)
    assert walk.results == (0, 4)
    assert walk.reduced == 1


def test_a_tensor_with_offsets_above_32_bits_is_reduced_in_parts() -> None:
    walk = reduction((3, 2**30), (2**30, 1), (1,), itemsize=4, result_itemsize=4)
    parts = list(walk.parts())
    assert len(parts) > 2
    assert sum(torch.Size(part.shape).numel() for part in parts) == 3 * 2**30


def test_softmax_in_backward_multiplies_gradient_and_result() -> None:
    scores = meta(64, 1000)
    found = blocks(A100, aten._softmax_backward_data.default, scores, scores, -1, torch.float32)
    assert found == [256_000, -256_000]


def test_storage_of_sorts_and_scans() -> None:
    assert sorting.radix_sort(A100, 8192, 8, sorting.bits_for(50304), 8) == 138_751
    assert sorting.radix_sort(A100, 1_000_000, 4) == 12_342_527
    assert sorting.radix_sort(H100, 1_000_000, 4) == 12_200_191
    assert sorting.radix_sort(A100, 1000, 8) == 1
    assert sorting.scan_storage(10_000_000, 4) == 42_495
    assert sorting.scan_storage(10_000_000, 8) == 179_711
    assert sorting.unique_storage(A100, 1_000_000) == 13_055


def test_an_operation_of_cudnn_is_not_known_completely() -> None:
    args = (meta(8, 3, 32, 32), meta(16, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(*args)
    found = cuda_workspaces.workspace(A100, aten.convolution.default, args, {}, out)
    assert found is not None
    assert not found.complete


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("h200", "H200"),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, found: str) -> None:
    gpu = gpus.named(name)
    assert gpu is not None
    assert gpu.name == found


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the name of a GPU: T4"):
        gpus.chosen("abacus")
