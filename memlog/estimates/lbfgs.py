"""Step of ``torch.optim.LBFGS`` that decides by no value, for fake tensors.

The real step ends an iteration, keeps a direction, or searches along it further, depending on values. Here
each step makes all its iterations, the history is full after the first step, and a search along a line
(``strong_wolfe``) narrows its bracket twice. So the estimate is that of a training's largest steps. The
allocations follow ``torch/optim/lbfgs.py`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

_EVALUATIONS = 3
"""Evaluations of a search along a line. Further ones need no more memory."""


@contextmanager
def lbfgs_without_values() -> Iterator[None]:
    """Inside the block, the steps of LBFGS decide by no value."""
    step: Any = Optimizer.profile_hook_step(_step)
    step.hooked = True
    with patch.object(LBFGS, "step", step):
        yield


@torch.no_grad()
def _step(self: LBFGS, closure: Callable[[], Tensor]) -> Tensor:
    evaluate = torch.enable_grad()(closure)
    group, own = self.param_groups[0], self.state[self._params[0]]
    loss: Tensor = evaluate()
    gradient = self._gather_flat_grad()
    gradient.abs().max()
    evaluations = 1
    direction, rest = own.get("d"), None  # torch's function holds both until it has new ones
    for iteration in range(1, group["max_iter"] + 1):
        direction, rest = _direct(own, direction, gradient, group["history_size"])
        rate = group["lr"]
        slope = gradient.dot(direction)
        if group["line_search_fn"] is not None:
            most = min(group["max_eval"] - evaluations, _EVALUATIONS)
            gradient = _search(self, evaluate, direction, gradient, slope, most)
            self._add_grad(rate, direction)
            evaluations += most
        else:
            self._add_grad(rate, direction)
            if iteration < group["max_iter"]:
                evaluate()
                gradient = self._gather_flat_grad()
                gradient.abs().max()
                evaluations += 1
        if evaluations >= group["max_eval"]:
            break
        direction.mul(rate).abs().max()
    own["d"] = direction
    del rest
    for name in ("old_dirs", "old_stps"):
        own[name] += [
            torch.empty_like(gradient) for _ in range(group["history_size"] - len(own[name]))
        ]
    return loss


def _direct(
    own: dict[str, Any], last: Tensor | None, gradient: Tensor, size: int
) -> tuple[Tensor, Tensor | None]:
    """Return the direction of an iteration. Add the ``last`` direction and step to the history."""
    if last is None:
        direction = gradient.neg()
        own.update(old_dirs=[], old_stps=[], al=[None] * size)
        own["prev_flat_grad"] = gradient.clone(memory_format=torch.contiguous_format)
        return direction, None
    change, moved = gradient.sub(own["prev_flat_grad"]), last.mul(1.0)
    product = change.dot(moved)
    for name, new in (("old_dirs", change), ("old_stps", moved)):
        if len(own[name]) == size:
            own[name].pop(0)
        own[name].append(new)
    scale = product / change.dot(change)
    rest = gradient.neg()
    for at in range(len(own["old_dirs"])):
        own["al"][at] = own["old_stps"][at].dot(rest) * product
        rest.add_(own["old_dirs"][at])
    direction = torch.mul(rest, scale)
    for at in range(len(own["old_dirs"])):
        own["old_dirs"][at].dot(direction)
        direction.add_(own["old_stps"][at])
    own["prev_flat_grad"].copy_(gradient)
    return direction, rest


def _search(
    optimizer: LBFGS,
    evaluate: Callable[[], Tensor],
    direction: Tensor,
    gradient: Tensor,
    slope: Tensor,
    evaluations: int,
) -> Tensor:
    """Search along a line as ``strong_wolfe`` does, and return the gradient at the point found."""
    start = optimizer._clone_param()
    direction.abs().max()
    bracket = [gradient.clone(memory_format=torch.contiguous_format)] * 2
    found = gradient
    for _ in range(evaluations):
        optimizer._add_grad(1.0, direction)
        evaluate()
        new = optimizer._gather_flat_grad()
        optimizer._set_param(start)
        found = new
        new.dot(direction).mul(slope)
        bracket[1] = found.clone(memory_format=torch.contiguous_format)
    return bracket[1]
