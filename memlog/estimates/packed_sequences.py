"""Packed sequences of fake tensors (``torch.nn.utils.rnn.pack_padded_sequence``).

The bytes of a packed sequence depend on the lengths. If the program passes numbers, the lengths are known. If
they are in a tensor, each sequence counts with the full length. The allocations follow ATen's
``PackedSequence.cpp`` (torch 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import _VF, Tensor
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_PACKS: Final = rnn.__file__


@contextmanager
def packed_sequences() -> Iterator[None]:
    """Let programs pack and unpack fake tensors inside the block."""
    lengths = _Lengths()
    with (
        lengths,
        patch.object(_VF, "_pack_padded_sequence", _packing(lengths), create=True),
        patch.object(_VF, "_pad_packed_sequence", _unpack, create=True),
    ):
        yield


class _BatchSizes(Tensor):
    """Real tensor with the number of samples at each step. torch's recurrent layers read it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # torch's own idiom

    @classmethod
    def of(cls, sizes: Sequence[int]) -> _BatchSizes:
        with _disable_current_modes():
            made: _BatchSizes = torch.tensor(sizes, dtype=torch.int64).as_subclass(cls)
        made.sizes = list(sizes)
        return made

    sizes: list[int]

    def __getitem__(self, at: Any) -> Any:
        return self.sizes[at]


class _Lengths(TorchFunctionMode):
    """Mode that notes the lengths that ``pack_padded_sequence`` gets as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[int] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.as_tensor and _packs(kwargs):
            self.known = [int(each) for each in args[0]]
        return func(*args, **(kwargs or {}))

    def take(self, samples: int, steps: int) -> list[int]:
        """Return the lengths of the sequences, the longest first."""
        known, self.known = self.known, None
        return sorted(known or [steps] * samples, reverse=True)


def _packs(kwargs: Any) -> bool:
    frame: Any = sys._getframe(2)
    return bool(kwargs) and frame.f_code.co_filename == _PACKS


def _packing(lengths: _Lengths) -> Callable[..., tuple[Tensor, Tensor]]:
    def pack(values: Tensor, _: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        steps, samples = (
            values.shape[1 - each] if batch_first else values.shape[each] for each in (0, 1)
        )
        of_samples = lengths.take(samples, steps)
        sizes = [sum(one > at for one in of_samples) for at in range(of_samples[0])]
        packed: Tensor = _Pack.apply(values, sizes, batch_first)
        return packed, _BatchSizes.of(sizes)

    return pack


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first step, the step after the last, and the batch size, for steps of equal batch size."""
    first = 0
    for size, run in groupby(sizes):
        end = first + len(list(run))
        yield first, end, size
        first = end


class _Pack(torch.autograd.Function):
    """``aten::_pack_padded_sequence`` and its derivative."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sizes: Sequence[int], batch_first: bool) -> Tensor:
        by_steps = values.transpose(0, 1) if batch_first else values
        ctx.shape, ctx.sizes, ctx.batch_first = by_steps.shape, sizes, batch_first
        parts = [
            by_steps[first:end, :size].contiguous().view(-1, *by_steps.shape[2:])
            for first, end, size in _runs(sizes)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole = gradient.new_zeros(ctx.shape)
        offset = 0
        for at, size in enumerate(ctx.sizes):
            whole[at, :size].copy_(gradient[offset : offset + size])
            offset += size
        return (whole.transpose(0, 1) if ctx.batch_first else whole), None, None


def _unpack(
    values: Tensor, sizes: Any, batch_first: bool, padding: float, steps: int
) -> tuple[Tensor, Tensor]:
    rest = values.shape[1:]
    whole = values.new_full((steps, sizes[0], *rest), padding)
    offset = 0
    for first, end, size in _runs(sizes.sizes):
        count = (end - first) * size
        whole[first:end, :size].copy_(
            values[offset : offset + count].view(end - first, size, *rest)
        )
        offset += count
    lengths = torch.empty(sizes[0], dtype=torch.int64)
    return (whole.transpose(0, 1) if batch_first else whole), lengths
