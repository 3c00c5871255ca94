"""The fake mode's repetitions of operations, compared with what torch finds out itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.fake_step import only_new_objects

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "a new tensor": lambda x: x * 2,
    "an integer, which keeps the type of integers": lambda x: x.long() * 2,
    "a fraction, which does not": lambda x: x.long() * 2.0,
    "a view": lambda x: x.t()[1:, 2:],
    "several views": lambda x: x.split(2),
    "in place": lambda x: x.add_(1),
    "several new tensors": lambda x: torch._foreach_mul([x, x.t()], 2),
    "a composed operation": lambda x: torch.native_dropout(x, 0.1, True),
    "a normalisation": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "an operation that returns its argument's storage": lambda x: torch.unsafe_split(x, 2),
    "other strides": lambda x: x.t().contiguous().t() + 1,
    "a complex result": lambda x: torch.fft.fft(x).conj(),
    "no argument": lambda _: torch.zeros(3, dtype=torch.int8),
}


def results(operation: Any, *shape: int) -> list[list[Any]]:
    """Describe the results of an operation for a new tensor."""
    x = torch.empty(shape)
    storage = x.untyped_storage()._cdata
    return [described(one, storage) for one in tree_leaves(operation(x))]


def described(one: Tensor, storage: int) -> list[Any]:
    held = one.untyped_storage()
    layout = [one.shape, one.stride(), one.storage_offset()]
    return [*layout, one.dtype, one.device, held.nbytes(), held._cdata == storage]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_repeated_operation_returns_what_torch_returns(operation: Any) -> None:
    found = []
    for mode in (FakeTensorMode(), FakeMode()):
        with mode:
            found += [results(operation, 4, 6) for _ in range(3)]
    assert found == [found[0]] * 6


SHAPES = ((4, 6), (2, 3), (1, 6), (5, 1), (2, 3, 4, 5), (2, 3, 1, 1))
ALIKE: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": functional.relu,
    "of two tensors": lambda x: x * x,
    "of a number": lambda x: x + 1,
    "of another type": lambda x: (x > 0, x.double() + x),
    "in place": lambda x: x.clamp_(0),
    "broadcast": lambda x: x * x[:1],
    "a tensor of another order": lambda x: x.transpose(0, -1) + 1,
    "two of different orders": lambda x: x + x.transpose(-2, -1).contiguous().transpose(-2, -1),
    "like another": lambda x: (torch.zeros_like(x), torch.ones_like(x, dtype=torch.int8)),
    "like one, in another order": lambda x: torch.empty_like(
        x.expand(1, 1, *x.shape)[..., 0], memory_format=torch.preserve_format
    ),
    "several": lambda x: torch.native_dropout(x, 0.1, True),
    "views": lambda x: (x.t() if x.ndim < 3 else x[0], x.flatten(), x.unsqueeze(0)),
    "a normalisation": lambda x: torch.native_batch_norm(
        x, x[0, :, None].mean(1) if x.ndim == 2 else None, None, None, None, True, 0.1, 1e-5
    ),
    "a normalisation with a weight": lambda x: torch.native_batch_norm(
        torch.cat([x, x]), *[torch.ones(x.shape[1]) for _ in range(4)], True, 0.1, 1e-5
    ),
    "a normalisation's gradients": lambda x: torch.ops.aten.native_batch_norm_backward(
        x, x, *[torch.ones(x.shape[1]) for _ in range(5)], True, 1e-5, [True, True, True]
    ),
}


@pytest.mark.parametrize("operation", ALIKE.values(), ids=ALIKE.keys())
def test_an_operation_repeated_with_other_shapes_returns_what_torch_returns(operation: Any) -> None:
    found = []
    for mode in (FakeTensorMode(), FakeMode()):
        with mode:
            found += [results(operation, *shape) for shape in SHAPES]
    assert found[:6] == found[6:]


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": functional.mse_loss,
    "smooth l1": functional.smooth_l1_loss,
    "soft margin": functional.soft_margin_loss,
    "binary cross entropy": functional.binary_cross_entropy,
    "huber": functional.huber_loss,
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_keeps_the_bytes_that_a_real_one_keeps(loss: Any, reduction: str) -> None:
    def kept() -> int:
        values = torch.full((4, 6), 0.5)
        return loss(values, values, reduction=reduction).untyped_storage().nbytes()

    real = kept()
    with FakeMode():
        assert [kept(), kept()] == [real, real]


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_grouped_mm"), reason="this torch has no such operation"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_of_a_mixture_of_experts_is_as_large_as_a_real_one(dtype: torch.dtype) -> None:
    def multiplied() -> list[Any]:
        rows, experts = torch.zeros(16, 32, dtype=dtype), torch.zeros(2, 32, 24, dtype=dtype)
        ends = torch.full((2,), 16, dtype=torch.int32)
        return described(torch.ops.aten._grouped_mm.default(rows, experts, ends), 0)

    real = multiplied()
    with FakeMode():
        assert [multiplied(), multiplied()] == [real, real]


def test_garbage_collection_is_as_before_an_estimate() -> None:
    before = gc.get_freeze_count()
    with only_new_objects(), only_new_objects():
        assert gc.get_freeze_count()
    assert gc.get_freeze_count() == before
