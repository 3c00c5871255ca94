"""Operations that need values which fake tensors don't have: packed sequences, scaled gradients, LBFGS.

The bytes of a packed sequence depend on the lengths. If the program passes numbers, the lengths are known. If
they are in a tensor, each sequence counts with the full length. The allocations follow ATen's
``PackedSequence.cpp`` (torch 2.13).

The real step ends an iteration, keeps a direction, or searches along it further, depending on values. Here
each step makes all its iterations, the history is full after the first step, and a search along a line
(``strong_wolfe``) narrows its bracket twice. So the estimate is that of a training's largest steps. The
allocations follow ``torch/optim/lbfgs.py`` (torch 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import rnn
from torch.optim import LBFGS
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from memlog.errors import ConfigurationError
from memlog.estimates.fakes import part_of, real_indices
from memlog.torchside.fakes import PACKING, FakeTensor, plain_subclass, without_modes

_CALCULATES = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ "
    "__abs__ __round__"
)
_LATE = 1000.0
"""Value that an optimizer reads from each fake tensor, such as the step counter. After 1,000 steps, the
behaviour of optimizers no longer changes."""
_DECIDES = "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__ __int__ __index__"

_READING: Final = frozenset((Tensor.item, Tensor.__format__, Tensor.numpy, Tensor.__array__))


class ValueUsedError(Exception):
    """Error: the program branches on a tensor's value, which an estimate does not compute."""


class ArrayMadeError(Exception):
    """Error: the program converts a tensor to a NumPy array, whose values an estimate does not compute."""


class UnknownNumber(float):
    """Number that stands for the value of a fake tensor (``loss.item()``).

    A calculation with it gives another unknown number. Comparing it, or converting it to `int` or `bool`,
    raises `ValueUsedError`, because the program would then branch on the value.
    """

    __hash__ = float.__hash__


def _calculating(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def calculate(self: UnknownNumber, *others: Any) -> Any:
        result = method(self, *others)
        return UnknownNumber(result) if isinstance(result, (int, float)) else result

    return calculate


def _deciding(*_: Any) -> Any:
    raise ValueUsedError


for _name in _CALCULATES.split():
    setattr(UnknownNumber, _name, _calculating(_name))
for _name in _DECIDES.split():
    setattr(UnknownNumber, _name, _deciding)


@contextmanager
def unknown_values() -> Iterator[None]:
    """Let programs read the values of fake tensors inside the block.

    Torch's optimizers may also branch on these values. The branches do not change the sizes of tensors.
    """
    mode = _Reading()
    hooks = (
        register_optimizer_step_pre_hook(lambda optimizer, *_: mode.optimizer(optimizer)),
        register_optimizer_step_post_hook(lambda *_: mode.optimizer(None)),
    )
    try:
        with mode, _scalers(), real_indices(), lbfgs_without_values(), packed_sequences():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _scalers() -> Iterator[None]:
    """Let gradient scalers step their optimizers, as they do if no gradient is infinite.

    Afterwards, the scalers have the state that they had before.
    """
    before = list[tuple[GradScaler, dict[str, Any]]]()
    scale = GradScaler.scale

    def scaled(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled() and not any(scaler is self for scaler, _ in before):
            before.append((self, dict(vars(self))))
            states = self._per_optimizer_states.copy()
            # The scaler makes its scale again, now as a fake tensor.
            vars(self).update(_scale=None, _growth_tracker=None, _per_optimizer_states=states)
        return scale(self, outputs)

    def step(_: GradScaler, optimizer: Optimizer, __: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    try:
        with (
            patch.object(GradScaler, "scale", scaled),
            patch.object(GradScaler, "_maybe_opt_step", step),
        ):
            yield
    finally:
        for scaler, state in before:
            vars(scaler).update(state)


class _Reading(TorchFunctionMode):
    """Mode that replaces torch's functions that read a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self._known = False

    def optimizer(self, stepping: Optimizer | None) -> None:
        """Note the optimizer whose step begins. If ``stepping`` is ``None``, note that the step has ended.

        Raises:
            ConfigurationError: The optimizer has real parameters: `memlog.estimate` did not get it.
        """
        self._known = stepping is not None
        groups = () if stepping is None else stepping.param_groups
        if not all(
            isinstance(part_of(parameter), FakeTensor)
            for group in groups
            for parameter in group["params"]
        ):
            raise ConfigurationError(
                f"the step uses an optimizer ({type(stepping).__name__}) that memlog.estimate did not get: "
                "pass optimizer="
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READING:
            return func(*args, **(kwargs or {}))
        part: Any = part_of(args[0])
        fake = isinstance(part, FakeTensor)
        if func is Tensor.item and fake and part.constant is None:
            return _LATE if self._known else UnknownNumber(1.0)
        if func is Tensor.__format__:
            return "?"
        if fake and func is not Tensor.item:
            raise ArrayMadeError
        return func(*args, **(kwargs or {}))


_PACKS: Final = rnn.__file__


@contextmanager
def packed_sequences() -> Iterator[None]:
    """Let programs pack and unpack fake tensors inside the block."""
    lengths = _Lengths()
    with (
        lengths,
        patch.object(PACKING, "_pack_padded_sequence", _packing(lengths), create=True),
        patch.object(PACKING, "_pad_packed_sequence", _unpack, create=True),
    ):
        yield


class _BatchSizes(Tensor):
    """Real tensor with the number of samples at each step. torch's recurrent layers read it."""

    __torch_function__ = plain_subclass  # torch's own idiom

    @classmethod
    def of(cls, sizes: Sequence[int]) -> _BatchSizes:
        with without_modes():
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
            self.known = [int(length) for length in args[0]]
        return func(*args, **(kwargs or {}))

    def take(self, samples: int, steps: int) -> list[int]:
        """Return the lengths of the sequences, the longest first."""
        known, self.known = self.known, None
        return sorted(known or [steps] * samples, reverse=True)


def _packs(kwargs: Any) -> bool:
    # Frame 1 is `__torch_function__`, frame 2 its caller.
    frame: Any = sys._getframe(2)
    return bool(kwargs) and frame.f_code.co_filename == _PACKS


def _packing(lengths: _Lengths) -> Callable[..., tuple[Tensor, Tensor]]:
    def pack(values: Tensor, _: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        steps, samples = (
            values.shape[1 - axis] if batch_first else values.shape[axis] for axis in (0, 1)
        )
        of_samples = lengths.take(samples, steps)
        sizes = [sum(length > at for length in of_samples) for at in range(of_samples[0])]
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


_EVALUATIONS = 3
"""Evaluations of a search along a line. Further ones need no more memory."""


@contextmanager
def lbfgs_without_values() -> Iterator[None]:
    """Inside the block, the steps of LBFGS decide by no value."""
    step: Any = Optimizer.profile_hook_step(_step)
    # Without this mark, each new LBFGS would wrap the step in torch's hooks again.
    step.hooked = True
    with patch.object(LBFGS, "step", step):
        yield


@torch.no_grad()
def _step(self: LBFGS, closure: Callable[[], Tensor]) -> Tensor:
    evaluate = torch.enable_grad()(closure)
    group, own = self.param_groups[0], self.state[self._params[0]]
    loss: Tensor = evaluate()
    gradient = self._gather_flat_grad()
    # The result is not used. It takes the memory that it takes in torch's function.
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
    # Later steps must find a full history.
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
    latest = gradient
    for _ in range(evaluations):
        optimizer._add_grad(1.0, direction)
        evaluate()
        new = optimizer._gather_flat_grad()
        optimizer._set_param(start)
        latest = new
        new.dot(direction).mul(slope)
        bracket[1] = latest.clone(memory_format=torch.contiguous_format)
    return bracket[1]
