"""Layers to which parameters, optimizer state, gradients and the memory of torch's wrappers belong."""

from __future__ import annotations

import functools
import sys
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from memlog.torchside import internals
from memlog.trace.encoding import BUFFER, COMMUNICATION, GRADIENT, OUTSIDE, PARAMETER, UNSHARDED
from memlog.tracer.function_patch import AroundPatch
from memlog.tracer.module_names import (
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
        tensors: list[tuple[Tensor, int, int]] = []
        for root in self._names.roots[self._registered :]:
            self._registered += 1
            model = root.module()
            if model is not None:
                tensors += self._tensors(model, root)
        return tensors

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
        # Python may have given the `id` of a deleted parameter to this one.
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
        members = getattr(module, method)() if scripted else registered(module, registry).items()
        # A list, because the module's dictionary can change while this generator waits.
        for name, tensor in list(members):
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
        number = internals.next_sequence_number()
        if number is not None:
            self._last_marked = number
            self._layers.mark(number, layer)
            self._lines.mark(number, 0)

    def mark_line(self, line: int) -> None:
        """Record that ``line`` of the program made the operations since the last `mark` or `mark_line`."""
        number = internals.next_sequence_number()
        if number is not None and number > self._last_marked:
            self._lines.mark(self._last_marked, line)
            self._last_marked = number

    def made_by_backward(self, layer: int) -> None:
        """Assign the newest operations of a backward pass (``create_graph=True``) to ``layer``.

        ``layer`` is the layer that the pass differentiates. At the first call in a pass, ``layer`` gets only
        the newest operation. At later calls, ``layer`` gets all operations since the previous call.
        """
        number = internals.next_sequence_number()
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


_Context = Callable[[], AbstractContextManager[object]]
_FUNCTIONS: Final = (
    (internals.FSDP + "_fsdp_param", "FSDPParam.init_all_gather_outputs", UNSHARDED),
    (internals.FSDP + "_fsdp_param", "FSDPParam.alloc_all_gather_outputs", UNSHARDED),
    (internals.FSDP + "_fsdp_param_group", "foreach_all_gather", COMMUNICATION),
    (internals.FSDP + "_fsdp_param_group", "foreach_reduce", COMMUNICATION),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", COMMUNICATION),
    ("torch.distributed", "Reducer._rebuild_buckets", COMMUNICATION),
)
"""Functions of torch: module, name in the module, and category of what the function allocates."""
_patches: dict[str, tuple[AroundPatch, int]] = {}


class WrapperMemory:
    """Categories of what the wrappers allocate from `begin` to `end`.

    Functions of modules that are imported later are not patched.

    Args:
        made_as: Function that returns a context for a category. What the thread allocates in the context gets
            the category.
    """

    def __init__(self, made_as: Callable[[int], AbstractContextManager[object]]) -> None:
        self._inside = {
            category: functools.partial(_inside, functools.partial(made_as, category))
            for category in (UNSHARDED, COMMUNICATION)
        }
        self._used: list[tuple[AroundPatch, int]] = []

    def begin(self) -> None:
        if not _has_ranks():
            return
        for module, path, category in _FUNCTIONS:
            owner = sys.modules.get(module)
            *kind, name = path.split(".")
            for attribute in kind:
                owner = getattr(owner, attribute, None)
            if path not in _patches and hasattr(owner, name):
                _patches[path] = AroundPatch(owner, name), category
        self._used = list(_patches.values())
        for patch, category in self._used:
            patch.add(self._inside[category])

    def end(self) -> None:
        for patch, category in self._used:
            patch.remove(self._inside[category])


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _inside(context: _Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context():
        return function(*args, **kwargs)


def bucket_sizes(roots: Iterable[Any]) -> list[int]:
    """Return the bytes of the buffers in which DistributedDataParallel reduces the gradients of ``roots``.

    The second step replaces the first step's buffers. Those that torch keeps longer are left out. torch tells
    the sizes, but not the addresses. Gradients that are views of the buffers are left out, too.
    """
    sizes: list[int] = []
    for root in roots if _has_ranks() else ():
        with suppress(Exception):  # no such wrapper, or a torch that tells less
            told = root._get_ddp_logging_data()
            if not told.get("gradient_as_bucket_view"):
                text = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
                sizes += map(int, text.split(", "))
    return sizes
