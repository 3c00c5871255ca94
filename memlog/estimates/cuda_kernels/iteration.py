"""Order of dimensions in which torch's kernels walk through tensors.

The rules are those of ``reorder_dimensions``, ``coalesce_dimensions`` and ``with_32bit_indexing`` in torch's
``aten/src/ATen/TensorIterator.cpp`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

_MOST = 2**31 - 1
"""Largest number of values, and largest offset in bytes, of a kernel with indices of 32 bits."""


class Reduction(NamedTuple):
    """Walk through the input of a reduction. The reduced dimensions are first, each group the fastest first.

    Strides are in bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    results: tuple[int, ...]
    """Strides of the result: 0 for the reduced dimensions."""

    @property
    def reduced(self) -> int:
        """Number of reduced dimensions."""
        return self.results.count(0)

    @property
    def outputs(self) -> int:
        return prod(self.shape[self.reduced :])

    def parts(self) -> Iterator[Reduction]:
        """Return the parts that kernels with indices of 32 bits compute one after the other."""
        if prod(self.shape) <= _MOST and all(
            sum((length - 1) * stride for length, stride in zip(self.shape, each, strict=True))
            < _MOST
            for each in (self.strides, self.results)
        ):
            yield self
            return
        at = self._longest()
        length = self.shape[at]
        for part in (length // 2, length - length // 2):
            yield from self._replace(shape=(*self.shape[:at], part, *self.shape[at + 1 :])).parts()

    def _longest(self) -> int:
        """Return the dimension with the largest extent in bytes (``get_dim_to_split``)."""
        best, found = -1, 0
        for at in reversed(range(len(self.shape))):
            for stride in (self.results[at], self.strides[at]):
                extent = (self.shape[at] - 1) * stride
                if extent > best:
                    best, found = extent, at
        return found


def reduction(
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Collection[int],
    *,
    itemsize: int,
    result_itemsize: int,
) -> Reduction:
    """Return the walk of a reduction of ``dims`` over a tensor. ``strides`` are numbers of values."""
    kept, step = [0] * len(shape), result_itemsize
    for at in reversed(range(len(shape))):
        if at not in dims:
            kept[at] = step
            step *= max(1, shape[at])
    kept = [
        0 if length == 1 and at in dims else one
        for at, (one, length) in enumerate(zip(kept, shape, strict=True))
    ]
    order = _order(shape, kept, [stride * itemsize for stride in strides])
    return _coalesced(
        [shape[at] for at in order],
        [strides[at] * itemsize for at in order],
        [kept[at] for at in order],
    )


def _order(shape: Sequence[int], results: Sequence[int], strides: Sequence[int]) -> list[int]:
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        at = start
        for before in reversed(range(start)):
            comparison = _compared(shape, results, strides, order[before], order[at])
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                break
    return order


def _compared(
    shape: Sequence[int], results: Sequence[int], strides: Sequence[int], one: int, other: int
) -> int:
    """Return 1 if dimension ``one`` comes after ``other``, -1 if before, 0 if that is not decided."""
    if (results[one] == 0) != (results[other] == 0):
        return 1 if results[other] == 0 else -1
    for each in (results, strides):
        if each[one] == 0 or each[other] == 0:
            continue
        if each[one] != each[other]:
            return -1 if each[one] < each[other] else 1
        if shape[one] > shape[other]:
            return 1
    return 0


def _coalesced(shape: list[int], strides: list[int], results: list[int]) -> Reduction:
    """Return the walk with neighbouring dimensions joined, if the strides allow it."""
    if len(shape) <= 1:
        return Reduction(tuple(shape), tuple(strides), tuple(results))
    last = 0
    for at in range(1, len(shape)):
        joined = 1 in (shape[last], shape[at]) or all(
            shape[last] * each[last] == each[at] for each in (strides, results)
        )
        if joined:
            if shape[last] == 1:
                strides[last], results[last] = strides[at], results[at]
            shape[last] *= shape[at]
        else:
            last += 1
            shape[last], strides[last], results[last] = shape[at], strides[at], results[at]
    return Reduction(*(tuple(each[: last + 1]) for each in (shape, strides, results)))
