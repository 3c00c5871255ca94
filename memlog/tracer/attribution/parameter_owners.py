"""Layers to which parameters and optimizer state belong."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlog.trace.encoding import BUFFER, GRADIENT, OUTSIDE, PARAMETER
from memlog.tracer.attribution.module_names import (
    ModuleNames,
    RootModule,
    registered,
    unique_modules,
)
from memlog.tracer.tensor_storages import StateTensor


class _Owner(NamedTuple):
    module: weakref.ref[Any]
    name: str
    layer: int
    root_layer: int

    def parameter(self, default: Any = None) -> Any:
        """Return the parameter; ``None`` if the module was deleted.

        Return ``default`` if the module lacks the parameter, or has no registry of parameters (TorchScript).
        """
        module = self.module()
        return None if module is None else registered(module, "_parameters").get(self.name, default)


class ParameterOwners:
    """Layers of the parameters in a window, by the parameters' ``id``.

    Modules are held weakly. memlog makes no weak reference to a parameter, because
    ``torch.utils.swap_tensors`` refuses tensors that have one. A module can use ``swap_tensors`` to convert
    itself to another type or device.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._known: dict[int, _Owner] = {}
        self._registered = 0

    def register_new_roots(self) -> list[tuple[Tensor, int, int]]:
        """Register the parameters of root modules that were found since the last call.

        Returns:
            Parameters, buffers and gradients of these root modules, each with its layer and category.
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
        for module, name, path, parameter in _members(model, "_parameters", "named_parameters"):
            layer = self._names.owner_of(path, root)
            self._known[id(parameter)] = _Owner(weakref.ref(module), name, layer, root_layer)
            yield parameter, layer, PARAMETER
            if parameter.grad is not None:
                yield parameter.grad, layer, GRADIENT
        for _, _, path, buffer in _members(model, "_buffers", "named_buffers"):
            yield buffer, self._names.owner_of(path, root), BUFFER

    def parameters(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the parameters that still exist, each with its layer."""
        for owner in list(self._known.values()):
            parameter = owner.parameter()
            if parameter is not None:
                yield parameter, owner.layer

    def of(self, parameter: Any) -> int:
        """Return the layer of a parameter; `OUTSIDE` if no module of the window has the parameter."""
        owner = self._owner(parameter)
        return OUTSIDE if owner is None else owner.layer

    def of_state(self, state: StateTensor) -> int:
        """Return the layer of a tensor in an optimizer's state.

        This is the layer of the tensor's parameter. If the tensor belongs to all parameters, this is the
        layer of the root module. Return `OUTSIDE` if no module of the window has the parameter.
        """
        owner = self._owner(state.parameter)
        if owner is None:
            return OUTSIDE
        return owner.root_layer if state.shared else owner.layer

    def _owner(self, parameter: Any) -> _Owner | None:
        owner = self._known.get(id(parameter))
        return owner if owner is not None and owner.parameter(parameter) is parameter else None


def _members(model: Any, registry: str, method: str) -> Iterator[tuple[Any, str, str, Tensor]]:
    """Yield each parameter or buffer once, with its module, its name in the module, and its full path.

    ``registry`` names the module's dictionary of parameters or buffers. A TorchScript module has no such
    dictionary, so its method with the name ``method`` is called.
    """
    seen: set[int] = set()
    for prefix, module in unique_modules(model):
        scripted = issubclass(type(module), torch.jit.ScriptModule)
        found = getattr(module, method)() if scripted else registered(module, registry).items()
        for name, tensor in list(found):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, name, f"{prefix}.{name}" if prefix else name, tensor
