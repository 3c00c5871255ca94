"""Layers of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memlog.trace.encoding import BUFFER, GRADIENT, OUTSIDE, PARAMETER
from memlog.tracer.attribution.module_names import ModuleNames, RootModule
from memlog.tracer.tensor_storages import StateTensor


class ParameterOwners:
    """Layers of the parameters in a window. Parameters are held weakly, by identity."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._known: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._registered = 0

    def register_new_roots(self) -> list[tuple[Tensor, int, int]]:
        """Register the parameters of root modules that were found since the last call.

        Returns:
            Their parameters, buffers and gradients, each with its layer and category.
        """
        found: list[tuple[Tensor, int, int]] = []
        for root in self._names.roots[self._registered :]:
            self._registered += 1
            model = root.module()
            if model is not None:
                found += self._tensors(model, root)
        return found

    def _tensors(self, model: Any, root: RootModule) -> Iterator[tuple[Tensor, int, int]]:
        root_layer = self._names.owner_of("", root)
        for name, parameter in model.named_parameters():
            layer = self._names.owner_of(name, root)
            self._known[id(parameter)] = (weakref.ref(parameter), layer, root_layer)
            yield parameter, layer, PARAMETER
            if parameter.grad is not None:
                yield parameter.grad, layer, GRADIENT
        for name, buffer in model.named_buffers():
            yield buffer, self._names.owner_of(name, root), BUFFER

    @property
    def has_new_roots(self) -> bool:
        """True if there are root modules to register."""
        return self._registered < len(self._names.roots)

    def parameters(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the parameters that still exist, each with its layer."""
        for reference, layer, _ in list(self._known.values()):
            parameter = reference()
            if parameter is not None:
                yield parameter, layer

    def of(self, parameter: Any) -> int:
        """Return the layer of a parameter; "outside" if no module of the window has it."""
        known = self._known.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else OUTSIDE

    def of_state(self, state: StateTensor) -> int:
        """Return the layer of a state tensor: its parameter's, or the root's if all parameters share it."""
        known = self._known.get(id(state.parameter))
        if known is None or known[0]() is not state.parameter:
            return OUTSIDE
        return known[2] if state.shared else known[1]
