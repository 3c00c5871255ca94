"""Memory that oneDNN's LSTM keeps for its backward pass, and the LSTM's workspace.

Both are measured on a few time steps and extrapolated. Each time step adds the same number of bytes, except
for rounding to pages. If the weights or the batch are large, the measurements use a smaller batch, smaller
inputs and smaller states, too. The bytes grow with the square of the states' size, as the weights do. So
memlog measures three sizes of states, and computes the bytes from a parabola.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlog._internal.terminal import MIB
from memlog.estimates.real_tensors import real_tensor
from memlog.tracer.engines.cpu import op_workspace
from memlog.tracer.engines.cpu.op_workspace import Workspace

OPERATIONS: Final = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_aten: Final = torch.ops.aten
_FORWARD: Final = _aten.mkldnn_rnn_layer.default
_STEPS: Final = (16, 32)
_LARGE: Final = 4 * MIB
"""Size limit, in bytes, for each weight matrix, and for the states of 32 time steps together.

- If none of them is larger, memlog cuts only the time steps.
- If a weight matrix or the states are larger, memlog also cuts the batch, the inputs and the states."""
_LARGE_STEPS, _LARGE_BATCH = (4, 8), (8, 16)
_SQUARE, _NARROW, _WIDE = (256, 512, 768), (256, 512), (1024, 1280)
"""Sizes to measure if a weight matrix or the states exceed `_LARGE`.

- If the inputs are smaller than the states: `_NARROW` for the inputs, `_TALL` for the states.
- If the inputs are larger than the states: `_WIDE` for the inputs, `_SQUARE` for the states.
- If both are equal: `_SQUARE` for both."""
_TALL: Final = (512, 768, 1024)
"""Sizes to measure for states that are larger than the inputs."""
_ROW, _BLOCK = 256, 16
"""Divisors of a row's length. oneDNN makes a row longer if its length is a multiple of `_ROW`, and copies a
row if its length is not a multiple of `_BLOCK`. So `_points` chooses lengths for which oneDNN does the same
as for the full length."""
_TENSORS: Final = 7  # first arguments: the input, four weights, and two states
_HIDDEN: Final = 10
"""Position of the states' size among the arguments of the forward operation."""
_OF_FORWARD: Final = (13, 20, 14, 15, 16, 17, 19, 21, 18)
"""Positions in the backward operation's arguments. The values at these positions, in this order, are the
arguments that the forward operation gets after its tensors."""
_GRADIENTS: Final = slice(10, 13)
_HIDDEN_BACKWARD: Final = 15
_NUMBERS: Final = range(13, 22)


class _Measured(NamedTuple):
    forward: list[int]
    """Bytes of the forward operation's allocations (positive) and frees (negative)."""
    backward: list[int]
    kept: list[int]
    """Bytes that the forward operation keeps for the backward operation, as a list with one number."""


def kept(args: Any, _out: Any) -> int:
    """Return the bytes of the forward operation's last result; 0 if they can't be measured."""
    with _disable_current_modes():
        found = _extrapolated(args, None, ())
    return 0 if found is None else found.kept[0]


def workspace(func: Any, args: Any) -> Workspace | None:
    """Return the workspace of one of the `OPERATIONS`; ``None`` if it can't be measured."""
    backward = args if func is not _FORWARD else None
    forward = args if backward is None else [*args[:_TENSORS], *(args[at] for at in _OF_FORWARD)]
    trains = torch.is_grad_enabled() or backward is not None
    with _disable_current_modes(), torch.set_grad_enabled(trains):
        found = _extrapolated(forward, backward, ())
    if found is None:
        return None
    return op_workspace.workspace_of(found.backward if backward else found.forward)


def _extrapolated(forward: Any, backward: Any, chosen: tuple[int, ...]) -> _Measured | None:
    """Return the operations' allocations, extrapolated from measurements; ``None`` if a measurement fails.

    ``forward`` and ``backward`` are the operations' arguments. If ``backward`` is ``None``, only the forward
    operation is measured. ``chosen`` holds new lengths of the first dimensions, numbered as in `_points`.
    """
    lengths = (*forward[0].shape, forward[_HIDDEN])
    at = len(chosen)
    if at == len(lengths):
        return _measured(forward, backward, *chosen)
    if at == len(lengths) - 1 and lengths[at] == lengths[at - 1]:
        # Inputs and states are equal in size. They stay equal in each measurement.
        return _extrapolated(forward, backward, (*chosen, chosen[-1]))
    points = _points(forward, at)
    if lengths[at] <= points[-1]:
        return _extrapolated(forward, backward, (*chosen, lengths[at]))
    measured = [_extrapolated(forward, backward, (*chosen, each)) for each in points]
    found = [each for each in measured if each is not None]
    if len(found) < len(points):
        return None
    return _Measured(
        *(op_workspace.extrapolated(each, points, lengths[at]) for each in zip(*found, strict=True))
    )


def _points(forward: Any, at: int) -> tuple[int, ...]:
    """Return the lengths to measure for dimension ``at``.

    Dimensions are numbered: 0 for time steps, 1 for samples, 2 for inputs, 3 for states.
    """
    inputs, weights = forward[0], forward[1:3]
    length = (*inputs.shape, forward[_HIDDEN])[at]
    states = _STEPS[-1] * inputs.shape[1] * forward[_HIDDEN] * inputs.itemsize
    if max(states, *(each.nbytes for each in weights)) <= _LARGE:
        return (length,) if at else _STEPS
    if at < len(inputs.shape) - 1:
        return (_LARGE_STEPS, _LARGE_BATCH)[at]
    wide = inputs.shape[-1] - forward[_HIDDEN]
    if not wide:
        points: tuple[int, ...] = _SQUARE
    elif at == len(inputs.shape) - 1:
        points = _WIDE if wide > 0 else _NARROW
    else:
        points = _SQUARE if wide > 0 else _TALL
    return tuple(each + (length % _ROW and _BLOCK + length % _BLOCK) for each in points)


def _measured(
    forward: Any, backward: Any, steps: int, samples: int, inputs: int, hidden: int
) -> _Measured | None:
    """Run the forward operation on real tensors. Also run the backward operation if ``backward`` is given.

    If gradients are disabled, the forward operation keeps nothing.
    """
    gates, state = 4 * hidden, (samples, hidden)
    weights = (gates, inputs), (gates, hidden)
    has_biases = forward[3].ndim == 1  # without biases, torch passes the weights again
    biases = ((gates,), (gates,)) if has_biases else weights
    shapes = ((steps, samples, inputs), *weights, *biases, state, state)
    tensors = list(map(real_tensor, forward[:_TENSORS], shapes))
    numbers = [*forward[_TENSORS:_HIDDEN], hidden, *forward[_HIDDEN + 1 :]]
    results, sizes = op_workspace.allocations(_FORWARD, (*tensors, *numbers), {})
    if sizes is None:
        return None
    kept_bytes = 0 if results[-1] is None else results[-1].nbytes
    if backward is None:
        return _Measured(sizes, [], [kept_bytes])
    gradients = [
        one if one is None else real_tensor(one, shape)
        for one, shape in zip(backward[_GRADIENTS], ((steps, *state), state, state), strict=True)
    ]
    others = [hidden if at == _HIDDEN_BACKWARD else backward[at] for at in _NUMBERS]
    given = (*tensors, *results[:-1], *gradients, *others, results[-1])
    more = op_workspace.allocations(_aten.mkldnn_rnn_layer_backward.default, given, {})[1]
    return None if more is None else _Measured(sizes, more, [kept_bytes])
