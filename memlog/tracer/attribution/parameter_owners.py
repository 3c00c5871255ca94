"""Which module each parameter belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memlog.trace.encoding import BUFFER, GRADIENT, OUTSIDE, PARAMETER
from memlog.tracer.attribution.module_names import ModuleNames, RootModule
from memlog.tracer.tensor_storages import StateTensor


class ParameterOwners:
    """The parameters of the modules in a window, known by identity and held weakly.

    Args:
        names: Which module is which layer.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._known: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._registered = 0

    def register_new_roots(self) -> list[tuple[Tensor, int, int]]:
        """Gets to know the modules at the top that are new.

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
        itself = self._names.owner_of("", root)
        for name, parameter in model.named_parameters():
            layer = self._names.owner_of(name, root)
            self._known[id(parameter)] = (weakref.ref(parameter), layer, itself)
            yield parameter, layer, PARAMETER
            if parameter.grad is not None:
                yield parameter.grad, layer, GRADIENT
        for name, buffer in model.named_buffers():
            yield buffer, self._names.owner_of(name, root), BUFFER

    @property
    def has_new_roots(self) -> bool:
        """Whether a module at the top is new."""
        return self._registered < len(self._names.roots)

    def parameters(self) -> Iterator[tuple[Tensor, int]]:
        """Those that are still there, each with its layer."""
        for reference, layer, _ in list(self._known.values()):
            parameter = reference()
            if parameter is not None:
                yield parameter, layer

    def of(self, parameter: Any) -> int:
        """The layer of a parameter; "outside" for one that is not the model's."""
        known = self._known.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else OUTSIDE

    def of_state(self, state: StateTensor) -> int:
        """The layer of its parameter; the module at the top, for state of all of an optimizer's."""
        known = self._known.get(id(state.parameter))
        if known is None or known[0]() is not state.parameter:
            return OUTSIDE
        return known[2] if state.shared else known[1]
