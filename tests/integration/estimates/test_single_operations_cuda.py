"""Estimated allocations of single operations and their derivatives, beside those of torch's allocator."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.allocations import of_an_estimate, of_the_allocator, with_sorted_end
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import memlog
from memlog.errors import ConfigurationError

pytestmark = pytest.mark.cuda

HALF = torch.bfloat16
Program = Callable[[], Tensor]


class Without(nn.Module):
    """A model without parameters, which calls a program and computes its derivative."""

    def forward(self, program: Program) -> None:
        derive(program())


def derive(out: Tensor) -> None:
    if out.requires_grad:
        out.backward(torch.ones_like(out))


def values(*shape: int, dtype: torch.dtype = torch.float32, learned: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=learned)


def indices(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def step(program: Program, model: nn.Module) -> None:
    model(program)


def both(program: Program) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Return the estimated allocations, those of torch's allocator, and what is not counted."""
    run: Any = partial(step, program)
    found = memlog.estimate(run, model=Without)
    estimated, real = of_an_estimate(found), of_the_allocator(lambda: run(Without()))
    return with_sorted_end(estimated), with_sorted_end(real), found.uncounted


def attention(
    mask: Callable[[], Tensor | None],
    *,
    keys: int = 128,
    size: int = 32,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Program:
    def program() -> Tensor:
        query, key, value = (
            values(2, length, 4, size, dtype=dtype).transpose(1, 2) for length in (128, keys, keys)
        )
        return F.scaled_dot_product_attention(query, key, value, mask(), dropout)

    return program


EXACT: dict[str, Program] = {
    "attention, learned bias with heads inside": attention(
        lambda: values(128, 128, 4).permute(2, 0, 1)[None].expand(2, -1, -1, -1)
    ),
    "attention, bias with aligned rows": attention(
        lambda: values(4, 400, 400)[:, :128, :130][None].expand(2, -1, -1, -1), keys=130
    ),
    "attention, bias with unaligned rows": attention(
        lambda: values(4, 128, 130, learned=False)[None], keys=130
    ),
    "attention, row of a mask": attention(lambda: values(2, 1, 1, 100), keys=100, dropout=0.1),
    "attention, unaligned strides": attention(lambda: values(128, 132)[:, :128]),
    "attention, shifted mask of booleans": attention(
        lambda: torch.zeros(128, 128, dtype=torch.bool, device="cuda")
    ),
}

EXACT |= {
    "layer norm without weights": lambda: F.layer_norm(values(64, 300, 96, dtype=HALF), (96,)),
    "logarithms of sigmoids": lambda: F.logsigmoid(values(64, 1000)),
    "largest values of permuted images": lambda: F.max_pool2d(
        values(33, 3, 15, 15).transpose(0, 1), 2, 1, return_indices=True
    )[0],
    "bicubic interpolation": lambda: F.interpolate(
        values(3, 33, 8, 8).contiguous(memory_format=torch.channels_last), size=19, mode="bicubic"
    ),
    "sum of products": lambda: torch.addbmm(values(33, 30), values(5, 33, 7), values(5, 7, 30)),
    "batch norm of permuted images": lambda: batch_norm(values(9, 8, 16, 7).permute(2, 3, 0, 1)),
    "batch norm of channels side by side": lambda: batch_norm(
        values(64, 33, 24, 24, dtype=HALF).contiguous(memory_format=torch.channels_last)
    ),
}


LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def images(layout: torch.memory_format = LAST, dtype: torch.dtype = torch.float32) -> Tensor:
    sides = (20, 21) if layout is LAST else (8, 10, 11)
    return values(3, 16, *sides, dtype=dtype).contiguous(memory_format=layout)


def with_transposed_gradient(program: Program) -> Program:
    """Return a program whose result gets a gradient that is not stored by rows."""

    def transposed() -> Tensor:
        out = program()
        last = out.ndim - 1
        return out.transpose(0, last).contiguous() if last else out

    return transposed


def of_groups(images: Tensor) -> Tensor:
    channels = images.shape[1]
    weight, bias = (values(channels, dtype=images.dtype) for _ in range(2))
    return F.group_norm(images, 4, weight, bias)


def in_evaluation(images: Tensor) -> Tensor:
    mean, variance = values(16, learned=False), values(16, learned=False)
    return F.batch_norm(images, mean, variance, values(16), values(16))


def by_columns() -> Tensor:
    return values(200, 300).t()


def of_a_part() -> Tensor:
    return values(300, 400)[:, :200]


def lengths(length: int) -> Tensor:
    return torch.full((16,), length)


def sequences(*lengths: Any) -> Tensor:
    scores = values(50, 16, 20).log_softmax(-1)
    return F.ctc_loss(scores, indices(16, 10) + 1, *lengths, reduction="sum")


EXACT |= {
    f"{name}, {dtype}": partial(program, dtype)
    for dtype in (torch.float32, HALF)
    for name, program in {
        "group norm of channels side by side": lambda dtype: of_groups(
            values(6, 20, 20, 16, dtype=dtype).permute(0, 3, 1, 2)
        ),
        "group norm of rows": lambda dtype: of_groups(values(600, 160, dtype=dtype)),
        "group norm of columns": lambda dtype: of_groups(values(160, 600, dtype=dtype).t()),
        "group norm without gradient": lambda dtype: of_groups(
            values(6, 16, 20, 20, dtype=dtype, learned=False)
        ),
        "adaptive maximum, channels last": lambda dtype: F.adaptive_max_pool2d(
            images(dtype=dtype), 3
        ),
        "trilinear interpolation, channels last": lambda dtype: F.interpolate(
            images(LAST_3D, dtype), size=(11, 13, 12), mode="trilinear"
        ),
        "nearest interpolation, channels last": lambda dtype: F.interpolate(
            images(LAST_3D, dtype), size=(11, 13, 12)
        ),
        "antialiased interpolation, channels last": lambda dtype: F.interpolate(
            images(dtype=dtype), size=(11, 13), mode="bicubic", antialias=True
        ),
        "shuffled pixels, channels last": lambda dtype: F.pixel_shuffle(images(dtype=dtype), 2),
        "grid": lambda dtype: F.affine_grid(
            values(6, 2, 3, dtype=dtype), [6, 3, 20, 20], align_corners=False
        ),
        "columns of images": lambda dtype: F.unfold(images(dtype=dtype), 3),
        "reflected margins, channels last": lambda dtype: F.pad(
            images(dtype=dtype), (2, 2, 3, 1), "reflect"
        ),
        "random probabilities": lambda dtype: torch.bernoulli(
            values(300, 200, dtype=dtype, learned=False)
        ),
        "distances": lambda dtype: torch.cdist(
            values(300, 200, dtype=dtype), values(20, 200, dtype=dtype)
        ),
    }.items()
}
EXACT |= {
    f"{name}, transposed gradient": with_transposed_gradient(program)
    for name, program in {
        "softmax": lambda: values(64, 7, 90).softmax(-1),
        "logarithms of softmax": lambda: values(64, 7, 90).log_softmax(-1),
        "softmax over columns": lambda: values(64, 7, 90, dtype=HALF).softmax(1),
        "averages": lambda: F.avg_pool2d(values(3, 16, 20, 20), 2),
        "adaptive averages": lambda: F.adaptive_avg_pool2d(values(3, 16, 20, 20), 3),
        "adaptive averages of volumes": lambda: F.adaptive_avg_pool3d(
            images(torch.contiguous_format), 3
        ),
        "bilinear interpolation": lambda: F.interpolate(
            values(3, 16, 20, 20), size=(31, 33), mode="bilinear"
        ),
        "nearest interpolation": lambda: F.interpolate(values(3, 16, 20, 20), scale_factor=2),
        "linear interpolation": lambda: F.interpolate(values(3, 16, 99), size=200, mode="linear"),
        "columns of images": lambda: F.unfold(values(3, 16, 20, 20), 3),
        "rms norm": lambda: F.rms_norm(
            values(60, 7, 96, dtype=HALF), (96,), values(96, dtype=HALF)
        ),
        "batch norm": lambda: F.batch_norm(values(6, 16, 20, 20), None, None, training=True),
        "batch norm in evaluation": lambda: in_evaluation(values(6, 16, 20, 20)),
        "reflected margins": lambda: F.pad(values(3, 16, 20, 20), (2, 2, 3, 1), "reflect"),
    }.items()
}
EXACT |= {
    "multilabel margin loss of a part": lambda: F.multilabel_margin_loss(
        of_a_part(), indices(300, 200)
    ),
    "margin loss of columns": lambda: F.multi_margin_loss(by_columns(), indices(300)),
    "likelihood of columns": lambda: F.nll_loss(by_columns(), indices(300)),
    "squared errors of columns": lambda: F.mse_loss(by_columns(), values(300, 200, learned=False)),
    "distances of the first degree": lambda: torch.cdist(values(300, 20), values(100, 20), p=1),
    "distances within a batch": lambda: F.pdist(values(100, 20)),
    "largest values of columns": lambda: by_columns().topk(7)[0],
    "largest values of long rows": lambda: values(64, 20_000).topk(7)[0],
    "place of the values of columns": lambda: torch.bucketize(
        by_columns().detach(), values(50, learned=False)
    ),
    "short permutation": lambda: torch.randperm(5000, device="cuda"),
    "long permutation": lambda: torch.randperm(50_000, device="cuda"),
    "rolled columns": lambda: by_columns().roll((3, 4), (0, 1)),
    "pairs of indices": lambda: of_a_part()[indices(500), indices(500)],
    "indices of 32 bits": lambda: of_a_part()[indices(500, dtype=torch.int32)],
    "loss of sequences, lengths as numbers": lambda: sequences([50] * 16, [10] * 16),
}


def batch_norm(images: Tensor) -> Tensor:
    channels = images.shape[1]
    weight, bias = values(channels), values(channels)
    return F.batch_norm(images, None, None, weight, bias, training=True)


def bags(choose: random.Random) -> Program:
    rows, width = choose.choice((10, 500, 50_000)), choose.choice((4, 48, 64, 200))
    count, each = choose.choice((1, 30, 4000)), choose.choice((1, 5, 50))
    mode = choose.choice(("sum", "mean", "max"))
    dtype = torch.float32 if mode == "max" else choose.choice((torch.float32, HALF))
    flat, more = choose.random() < 0.5, choose.random() < 0.5
    weighted, rare = mode == "sum" and choose.random() < 0.4, choose.random() < 0.2
    learned, padding = choose.random() < 0.5, choose.choice((None, 0))

    def program() -> Tensor:
        given = indices(count * each) if flat else indices(count, each)
        return F.embedding_bag(
            given,
            values(rows, width, dtype=dtype),
            indices(count + more) if flat else None,
            mode=mode,
            per_sample_weights=(
                values(*given.shape, dtype=dtype, learned=learned) if weighted else None
            ),
            include_last_offset=flat and more,
            padding_idx=padding,
            scale_grad_by_freq=rare and mode != "max",
        )

    return program


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")  # it copies columns
@pytest.mark.parametrize("name", EXACT)
def test_allocations_of_one_operation_are_the_allocators(name: str) -> None:
    estimated, real, uncounted = both(EXACT[name])
    assert estimated == real
    assert not uncounted


@pytest.mark.parametrize("seed", range(3))
def test_bags_of_embeddings(seed: int) -> None:
    choose = random.Random(seed)  # noqa: S311 - chooses shapes
    for _ in range(10):
        estimated, real, uncounted = both(bags(choose))
        assert estimated == real
        assert not uncounted


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_derivative_of_renorm_computes_as_on_the_device(dtype: torch.dtype) -> None:
    estimated, real, uncounted = both(lambda: values(300, 200, dtype=dtype).renorm(2, 0, 1.0))
    assert max(accumulate(estimated)) == max(accumulate(real))
    assert not uncounted


def test_lengths_in_tensors_count_as_the_longest_possible() -> None:
    estimated, real, uncounted = both(lambda: sequences(lengths(50), lengths(7)))
    assert sum(each for each in estimated if each > 0) > sum(each for each in real if each > 0)
    estimated, real, uncounted = both(lambda: sequences(lengths(50), lengths(10)))
    assert max(accumulate(estimated)) == pytest.approx(max(accumulate(real)), rel=0.004)
    assert not uncounted


def test_concatenated_targets_with_lengths_in_tensors_are_refused() -> None:
    def program() -> Tensor:
        return F.ctc_loss(values(50, 16, 20), indices(160), lengths(50), lengths(10))

    with pytest.raises(ConfigurationError, match="one row for each sample"):
        memlog.estimate(partial(step, program), model=Without)


UNKNOWN: dict[str, Program] = {
    "native_batch_norm": lambda: batch_norm(values(9, 8, 16, 7, dtype=HALF).permute(2, 3, 0, 1)),
    "masked_scatter_backward": lambda: values(30, 20).masked_scatter(
        torch.ones(30, 20, dtype=torch.bool, device="cuda"), values(30, 20)
    ),
    "embedding_renorm_": lambda: F.embedding(indices(40), values(30, 20), max_norm=1.0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_buffers_of_unknown_size_are_named(name: str) -> None:
    found = memlog.estimate(partial(step, UNKNOWN[name]), model=Without)
    assert any(name in each for each in found.uncounted)
