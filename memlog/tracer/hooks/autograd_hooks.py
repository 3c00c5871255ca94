"""Hooks that follow the backward pass from layer to layer, for engines that do not see single operations.

When the backward pass reaches a module, a hook runs on the graph node that made the module's output. When the
backward pass leaves the module, a hook runs on the node that made the module's input. Autograd runs a GPU's
backward pass, with the hooks, on autograd's own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer import torch_private
from memlog.tracer.attribution.autograd_sequence import MAX_RANGES
from memlog.tracer.tensor_storages import tensors_in


class BackwardMarks:
    """Hooks on nodes of the autograd graph.

    The hooks are freed with the graph, and do nothing after the window's end.

    Args:
        reached: Function to call with the layer that the backward pass reaches, on the thread of the backward
            pass.
    """

    def __init__(self, reached: Callable[[int], None], diagnostics: Diagnostics) -> None:
        self._reached: Callable[[int], None] | None = reached
        self._diagnostics = diagnostics
        self._marked: set[int] = set()

    def close(self) -> None:
        """Disable the hooks. Call this at the end of the window."""
        self._reached = None

    def mark(self, values: Any, layer: int) -> None:
        """Mark tensors as made by ``layer``.

        Skip tensors that are marked already: a module inside ``layer`` made them.
        """
        for tensor in tensors_in(values):
            node = tensor.grad_fn
            if node is None:
                continue
            number = torch_private.sequence_number(node)
            if number is None or number in self._marked or len(self._marked) >= MAX_RANGES:
                continue
            self._marked.add(number)
            node.register_prehook(partial(self._on_backward, layer))

    def _on_backward(self, layer: int, _gradients: Any) -> None:
        if self._reached is not None:
            with self._diagnostics.contained("following the backward pass"):
                self._reached(layer)
