"""Recurrent cells on a CUDA device, where one kernel computes all gates. On the CPU, torch computes each.

The kernels are ``_thnn_fused_gru_cell`` and ``_thnn_fused_lstm_cell`` (torch 2.13). They keep the gates for
the backward pass, as torch's derivatives of them do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

_KEPT_BY_GRU: Final = 5
"""Values that the GRU's kernel keeps for each value of the state."""


def gru_cell(
    values: Tensor,
    state: Tensor,
    weight: Tensor,
    state_weight: Tensor,
    bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> Tensor:
    gates, state_gates = values @ weight.t(), state @ state_weight.t()
    out: Tensor = _Gru.apply(gates, state_gates, state, bias, state_bias)
    return out


def lstm_cell(
    values: Tensor,
    state: Sequence[Tensor],
    weight: Tensor,
    state_weight: Tensor,
    bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gates, state_gates = values @ weight.t(), state[0] @ state_weight.t()
    out: tuple[Tensor, Tensor] = _Lstm.apply(gates, state_gates, state[1], bias, state_bias)
    return out


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, state_gates: Tensor, state: Tensor, *biases: Tensor | None
    ) -> Tensor:
        rows, width = state.shape
        kept = state.new_empty(rows, _KEPT_BY_GRU * width)
        ctx.save_for_backward(gates, state_gates, state, kept, *biases)
        return torch.empty_like(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gates, state_gates, state, _kept, *biases = ctx.saved_tensors
        found = torch.empty_like(gates), torch.empty_like(state_gates)
        of_state = torch.empty_like(state)
        of_biases = (
            None if bias is None else each.sum(0) for each, bias in zip(found, biases, strict=True)
        )
        del gradient
        return (*found, of_state, *of_biases)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, state_gates: Tensor, cell: Tensor, *biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kept = torch.empty_like(gates)
        out, new_cell = torch.empty_like(cell), torch.empty_like(cell)
        ctx.save_for_backward(gates, state_gates, cell, new_cell, kept, *biases)
        return out, new_cell

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_new_cell: Tensor) -> tuple[Tensor | None, ...]:
        gates, _state_gates, cell, _new_cell, _kept, *biases = ctx.saved_tensors
        found, of_cell = torch.empty_like(gates), torch.empty_like(cell)
        of_bias = None if biases[0] is None else found.sum(0)
        del gradient, of_new_cell
        return found, found, of_cell, of_bias, of_bias
