"""Layers to which parameters, optimizer state and operations of the backward pass belong."""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlog.trace.encoding import BUFFER, GRADIENT, OUTSIDE, PARAMETER
from memlog.tracer import torch_private
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


MAX_RANGES = 100_000
"""Maximum number of ranges to remember (1.2 MB); `SequenceMap` explains them. At the maximum, the oldest
half is dropped."""


class SequenceMap:
    """Map from the sequence numbers of one thread's operations to the layers (or lines) that made them.

    Autograd numbers the operations of each thread separately. A range is an unbroken sequence of operations
    by one layer. The numbers only rise, so the ranges are sorted.
    """

    def __init__(self) -> None:
        self._starts = array("q")
        self._layers = array("i")

    def mark(self, number: int, layer: int) -> None:
        """Record that ``layer`` makes the operations from ``number`` on."""
        if self._starts and self._starts[-1] == number:
            self._layers[-1] = layer  # the previous layer made no operation
            return
        if len(self._starts) >= MAX_RANGES:
            del self._starts[: MAX_RANGES // 2]
            del self._layers[: MAX_RANGES // 2]
        self._starts.append(number)
        self._layers.append(layer)

    def since(self, number: int, layer: int) -> None:
        """Assign operation ``number`` and all later operations to ``layer``.

        Operations before the last `mark` keep their layers. If `mark` was never called, do nothing.
        """
        if self._layers and self._layers[-1] != layer:
            self.mark(max(number, self._starts[-1]), layer)

    def layer_of(self, number: int) -> int | None:
        """Return the layer that made operation ``number``; ``None`` if unknown."""
        index = bisect_right(self._starts, number) - 1
        return self._layers[index] if index >= 0 else None


class GraphOwners:
    """Layer and line of the program for each operation in one thread's autograd graph."""

    def __init__(self) -> None:
        self._layers = SequenceMap()
        self._lines = SequenceMap()
        self._last_marked = 0
        self._backward_mark: int | None = None
        """Number of the first operation that `made_by_backward` has not assigned yet; ``None`` before the
        first call of `made_by_backward` in a backward pass."""

    def mark(self, layer: int) -> None:
        """Record that ``layer`` makes the next operations."""
        number = torch_private.next_sequence_number()
        if number is not None:
            self._last_marked = number
            self._layers.mark(number, layer)
            self._lines.mark(number, 0)

    def mark_line(self, line: int) -> None:
        """Record that ``line`` of the program made the operations since the last `mark` or `mark_line`."""
        number = torch_private.next_sequence_number()
        if number is not None and number > self._last_marked:
            self._lines.mark(self._last_marked, line)
            self._last_marked = number

    def made_by_backward(self, layer: int) -> None:
        """Assign the newest operations of a backward pass (``create_graph=True``) to ``layer``.

        ``layer`` is the layer that the pass differentiates. At the first call in a pass, ``layer`` gets only
        the newest operation. At later calls, ``layer`` gets all operations since the previous call.
        """
        number = torch_private.next_sequence_number()
        if number is not None:
            seen = number - 1 if self._backward_mark is None else self._backward_mark
            self._layers.since(seen, layer)
            self._backward_mark = number

    def backward_ends(self, layer: int) -> None:
        """Record the end of a backward pass.

        If the pass made a graph, assign the next operations to ``layer``.
        """
        if self._backward_mark is not None:
            self._layers.since(self._backward_mark, layer)
            self._backward_mark = None

    def owner_of(self, number: int) -> tuple[int, int]:
        """Return the layer and the line that made operation ``number``. An unknown layer or line is 0."""
        return self._layers.layer_of(number) or OUTSIDE, self._lines.layer_of(number) or 0
