"""Tell tensors that a program keeps and lets grow from the inputs of a step. Both are in its variables."""

from __future__ import annotations

import re
from collections import Counter
from math import prod

from memlog.events import TensorInput

_LOOKS = 2
"""If something grew at this number of looks in a row, it keeps what earlier steps made."""
_OWN = 0.4
"""If a variable's tensor grows at each look, and this part of the peaks' rise is its own bytes, it is kept.
``torch.cat`` has the old tensor beside the new one, so a half of the rise is the new one's. A model needs
several times the memory of its inputs."""


class KeptTensors:
    """Watch over the tensors that are seen at the ends of steps."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._gains: Counter[str] = Counter()
        self._grown: dict[str, _Growth] = {}

    def inputs_among(self, found: tuple[TensorInput, ...], peak: int) -> tuple[TensorInput, ...]:
        """Return the tensors that are inputs of this step. ``peak`` is the step's peak in bytes.

        The items of a container that gains items from look to look are left out, and so is a variable's
        tensor whose own growth explains the peaks.
        """
        held = Counter(container for each in found if (container := _container(each)))
        for name, count in held.items():
            if count > self._held.get(name, count):
                self._gains[name] += 1
            elif self._gains[name] < _LOOKS:
                self._gains[name] = 0
        self._held = held
        return tuple(
            each
            for each in found
            if not self._gains[_container(each)] and not self._explains_peaks(each, peak)
        )

    def _explains_peaks(self, each: TensorInput, peak: int) -> bool:
        size = _bytes(each)
        growth = self._grown.get(each.name)
        if growth is None or size < growth.size:
            self._grown[each.name] = _Growth(size, peak)
            return False
        growth.looks += size > growth.size
        growth.size = size
        return growth.looks >= _LOOKS and size - growth.first > _OWN * (peak - growth.peak)


class _Growth:
    """Sizes of a variable's tensor since it shrank last."""

    def __init__(self, size: int, peak: int) -> None:
        self.first = self.size = size
        self.peak = peak
        self.looks = 0


def _container(each: TensorInput) -> str:
    """Return the variable that holds an input as an item; empty if the input is a variable itself."""
    name, bracket, _ = each.name.partition("[")
    return name if bracket else ""


def _bytes(each: TensorInput) -> int:
    bits = re.search(r"\d+", each.dtype)  # none in ``bool``
    return prod(each.shape) * (1 if bits is None else int(bits[0]) // 8)
