"""Copies of weights that an LSTM on the CPU makes, which do not shrink with the batch.

oneDNN runs one layer of an LSTM in one direction at a time, each in one workspace. The forward pass has a
copy of the weights there, and the backward pass also copies some of their gradients (measured on x86 with
AVX-512).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

from memlog.trace.encoding import BACKWARD, TEMPORARY
from memlog.trace.predict.lifetimes import StorageLifetime, TracedStep

_GATES = 4
_VALUE = 4
"""Bytes of a value; oneDNN's other types are not in traces as `_weights` expects them."""
_LONG_ROW, _BLOCK = 256, 16
"""Divisors of the length of a weight's row. The backward pass copies the weight's gradient if the length is a
multiple of the first, or no multiple of the second."""


class _Weights(NamedTuple):
    """Bytes of the weights of one layer in one direction."""

    of_input: int
    of_state: int

    @property
    def biases(self) -> int:
        """Bytes of one bias, which has one value for each gate of each state."""
        return _GATES * _VALUE * isqrt(self.of_state // (_GATES * _VALUE))

    def in_workspace(self, phase: int) -> int:
        """Return the bytes of the copies in the workspace of a forward or backward pass."""
        rows = {size: size // self.biases for size in self}
        twice = [size for size in self if rows[size] % _LONG_ROW == 0 or rows[size] % _BLOCK]
        return sum(self) + (sum(twice) if phase == BACKWARD else 0)


class LstmsOnCpu:
    """LSTMs of a step that oneDNN runs.

    Packed sequences and LSTMs with projections have other kernels of torch, without such workspaces.

    Attributes:
        in_workspaces: Bytes of the copies in each workspace.
        kept: Bytes of each copy that the forward pass keeps, by layer. Only LSTMs without biases keep copies.
    """

    def __init__(self, traced: TracedStep) -> None:
        self.in_workspaces: dict[StorageLifetime, int] = {}
        self.kept: dict[int, set[int]] = {}
        if traced.trace.result.device != "cpu":
            return
        inside: dict[tuple[int, int], list[StorageLifetime]] = {}
        for storage in traced.storages:
            if storage.category == TEMPORARY and traced.kind(storage.layer) == "LSTM":
                inside.setdefault((storage.layer, storage.phase), []).append(storage)
        parameters = traced.parameters()
        for (layer, phase), storages in inside.items():
            sizes = parameters.get(layer, ())
            weights = _weights(sizes)
            copies = [one.in_workspace(phase) for one in weights]
            large = [storage for storage in storages if copies and storage.size > min(copies)]
            if not large:
                continue
            in_order = copies[::-1] if phase == BACKWARD else copies
            if len(large) % len(copies):  # some are not workspaces, and which ones is unknown
                in_order = [min(copies)]
            self.in_workspaces |= zip(large, itertools.cycle(in_order), strict=False)
            self.kept[layer] = set() if weights[0].biases in sizes else set(sizes)


def _weights(sizes: Sequence[int]) -> list[_Weights]:
    """Return the weights among an LSTM's parameters, in their order; empty if they are not as expected."""
    if len(sizes) < len(_Weights._fields):
        return []
    biases = _Weights(sizes[0], sizes[1]).biases
    each = 4 if list(sizes[2:4]) == [biases, biases] else 2
    if len(sizes) % each or not biases:
        return []
    found = [_Weights(*sizes[at : at + 2]) for at in range(0, len(sizes), each)]
    return found if all(one.of_state == sizes[1] for one in found) else []
