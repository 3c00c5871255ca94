"""Following the backward pass from layer to layer, where its operations can't be seen one by one.

A hook on the graph's node that made a module's output runs as the backward pass comes to that module; one on
the node that made its input runs as it leaves. Autograd runs device work on threads of its own, and these
hooks run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer import torch_private
from memlog.tracer.attribution.autograd_sequence import MAX_SPANS
from memlog.tracer.tensor_storages import tensors_in


class BackwardMarks:
    """Puts hooks on nodes of the graph. They go with the graph, and are nothing once the window is over.

    Args:
        reached: Called with the layer that the backward pass comes to, on the thread that runs it.
        diagnostics: Where errors are counted.
    """

    def __init__(self, reached: Callable[[int], None], diagnostics: Diagnostics) -> None:
        self._reached: Callable[[int], None] | None = reached
        self._diagnostics = diagnostics
        self._marked: set[int] = set()

    def close(self) -> None:
        """The window is over."""
        self._reached = None

    def module_begins(self, args: Any, surrounding: int) -> None:
        """What is fed to a module was made by what surrounds it, where no module is known to have."""
        self._mark(args, surrounding)

    def module_ends(self, output: Any, layer: int) -> None:
        """What a module returns was made by it, or by a module inside it, which has said so before."""
        self._mark(output, layer)

    def _mark(self, values: Any, layer: int) -> None:
        for tensor in tensors_in(values):
            node = tensor.grad_fn
            if node is None:
                continue
            number = torch_private.sequence_number(node)
            if number is None or number in self._marked or len(self._marked) >= MAX_SPANS:
                continue
            self._marked.add(number)
            node.register_prehook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[[Any], None]:
        def comes(_gradients: Any) -> None:
            if self._reached is not None:
                try:
                    self._reached(layer)
                except Exception as error:  # noqa: BLE001 - training goes on
                    self._diagnostics.fault("following the backward pass", error)

        return comes
