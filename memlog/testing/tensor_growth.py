"""Growth of the tensors in use after a test's steps: counted, so it does not vary from run to run."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from memlog._internal.inert_access import instances
from memlog._internal.terminal import format_bytes
from memlog.torchside.tensors import DisableTorchFunction

_MOST = 24
"""Maximum number of counts. Each one goes through all objects of the process."""
_EQUAL = 0.1
"""Largest relative difference of rises that are equal: a step may keep something small besides."""
_STAIRS = 3
"""Least number of equal rises that are growth, if nothing falls."""
_HARMLESS = 1024
"""Bytes a step. Programs keep a number of each step, such as a loss without its graph."""


class _Count(NamedTuple):
    step: int
    size: int
    """Bytes of all storages of tensors."""
    graphs: int
    """Number of tensors that keep an autograd graph."""


class TensorGrowth:
    """Counts of the tensors that are in use after steps."""

    def __init__(self) -> None:
        self.steps = 0
        self._counts: list[_Count] = []
        self._every = 1

    def after_step(self) -> None:
        """Count the tensors. In a long loop, not after each step."""
        self.steps += 1
        if self.steps % self._every:
            return
        self._counts.append(_count(self.steps))
        if len(self._counts) >= _MOST:
            self._counts = self._counts[1::2]
            self._every *= 2

    def found(self) -> str | None:
        """Return how the tensors in use grew; ``None`` if they did not.

        They grew if they are more in each step of the last third than in any step of the third before, and
        still become more within the last third; or if they never become fewer after the first third, and
        have risen at least `_STAIRS` times by the same amount, as with a tensor for each evaluation.
        """
        third = len(self._counts) // 3
        if not third:
            return None
        before, last = self._counts[-2 * third : -third], self._counts[-third:]
        steps = median(one.step for one in last) - median(one.step for one in before)
        since = f"from step {before[0].step} to step {last[-1].step}"
        sizes = [one.size for one in self._counts]
        rate = _rise(sizes[-2 * third : -third], sizes[-third:]) / steps
        if not rate and _is_staircase(sizes, third):
            rate = (sizes[-1] - sizes[-2 * third]) / (last[-1].step - before[0].step)
        if rate > _HARMLESS:
            return f"tensors in use after a step grew by {format_bytes(rate)} a step, {since}"
        graphs = [one.graphs for one in self._counts]
        if _rise(graphs[-2 * third : -third], graphs[-third:]) or _is_staircase(graphs, third):
            return (
                f"tensors that keep an autograd graph became more, {since}: keep `loss.item()` or "
                "`loss.detach()` instead of `loss`"
            )
        return None


def _rise(before: list[int], last: list[int]) -> float:
    """Return the rise between the middles of two thirds; 0 if the levels do not grow."""
    if min(last) <= max(before) or last[-1] <= last[0]:
        return 0.0
    return median(last) - median(before)


def _is_staircase(levels: list[int], third: int) -> bool:
    """Return True if levels that do not fall have equal rises, the newest one of them in the last third."""
    rises = [later - earlier for earlier, later in pairwise(levels)]
    if min(rises[third - 1 :]) < 0:
        return False
    newest = max(rises[-third:])
    equal = sum(abs(rise - newest) <= _EQUAL * newest for rise in rises)
    return newest > 0 and equal >= _STAIRS


def _count(step: int) -> _Count:
    """Count the tensors in use after a step, with those of the program's own subclasses."""
    sizes: dict[int, int] = {}
    graphs = 0
    with DisableTorchFunction():
        for tensor in instances(torch.Tensor):
            # A wrapper, such as a tensor of torch.func, has no storage.
            with suppress(RuntimeError, AttributeError, NotImplementedError):
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
                graphs += tensor.grad_fn is not None
    return _Count(step, sum(sizes.values()), graphs)
