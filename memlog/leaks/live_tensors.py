"""Search for tensors and autograd nodes among the objects that the garbage collector tracks."""

from __future__ import annotations

from contextlib import suppress
from types import MethodDescriptorType
from typing import Any, Final

import torch

from memlog._internal.inert_access import bases, class_namespace, is_kind, own_method
from memlog.leaks.kind_table import KindTable
from memlog.leaks.time_budget import TimeBudget

_base: Any = torch._C.TensorBase
VIEWS: Final = 0.5
"""If tensors show less than this part of their storages, they are views that keep larger tensors."""
_BY_ROWS: Final = (torch.sparse_csr, torch.sparse_bsr)


class LiveTensors:
    """The program's tensors. This object keeps them alive.

    ``objects`` are all objects that the collector tracks. ``first_node`` is the sequence number of the first
    graph node that the watched iterations made. If it is ``None`` (unknown), `roots` stays empty.

    Attributes:
        by_storage: Tensors of the storages that the caller asks for (``wanted``), by the storage's identity.
        roots: Tensors with a graph, and autograd nodes with a Python object. The newest root comes first.
            Each root is a tuple: sequence number of the graph's last node; the tensor or node; the graph's
            last node. A root is left out if its last node is older than ``first_node``.
    """

    def __init__(
        self,
        objects: list[Any],
        wanted: frozenset[int],
        first_node: int | None,
        budget: TimeBudget,
    ) -> None:
        self.by_storage: dict[int, list[Any]] = {}
        self.roots: list[tuple[int, Any, Any]] = []
        with torch._C.DisableTorchFunction():
            for one, kind in KindTable(_kind).select_until_spent(objects, budget):
                if kind == "tensor":
                    self._add_tensor(one, wanted, first_node)
                elif first_node is not None:
                    self._add_root(one, one, first_node)
        self.roots.sort(key=lambda root: -root[0])

    @property
    def own(self) -> list[Any]:
        """Containers of this object that hold tensors. A search for the tensors' owners must ignore them."""
        return [self.by_storage, *self.by_storage.values(), self.roots, *self.roots]

    def add_roots(self, holders: list[tuple[Any, Any]], first_node: int) -> None:
        """Insert tensors at the front of `roots`.

        ``holders`` has tuples of a tensor and the last node of the tensor's graph. Leave out tensors whose
        last node is older than ``first_node``.
        """
        added = [(_NO_SEQUENCE, holder, node) for holder, node in holders]
        self.roots[:0] = [one for one in added if _number(one[2]) >= first_node]

    def _add_tensor(self, tensor: Any, wanted: frozenset[int], first_node: int | None) -> None:
        try:
            for storage in map(storage_of, parts_of(tensor)):
                if storage in wanted:
                    self.by_storage.setdefault(storage, []).append(tensor)
            if first_node is not None and _base.requires_grad.__get__(tensor):
                node = _base.grad_fn.__get__(tensor)
                if node is not None:
                    self._add_root(tensor, node, first_node)
        except (RuntimeError, AttributeError):
            return  # a tensor without storage, or one that is being freed

    def _add_root(self, holder: Any, node: Any, first_node: int) -> None:
        number = _number(node)
        if first_node <= number < _NO_SEQUENCE:
            self.roots.append((number, holder, node))


_NO_SEQUENCE: Final = 2**62


def tensor_bytes(objects: list[Any], budget: TimeBudget) -> int | None:
    """Return the bytes of the storages of all tensors that have a Python object.

    The result is ``None`` if the time of ``budget`` runs out.

    ``objects`` are all objects that the collector tracks.
    """
    sizes: dict[int, int] = {}
    with torch._C.DisableTorchFunction():
        for one, kind in KindTable(_kind).select_until_spent(objects, budget):
            if kind == "tensor":
                with suppress(RuntimeError, AttributeError):
                    storage = _base.untyped_storage(one)
                    sizes[int(storage._cdata)] = int(storage.nbytes())
    return None if budget.spent else sum(sizes.values())


def parts_of(tensor: Any) -> tuple[Any, ...]:
    """Return the tensors that have a tensor's storages: the tensor itself, or a sparse one's parts."""
    layout = _base.layout.__get__(tensor)
    if layout is torch.sparse_coo:
        return _base._values(tensor), _base._indices(tensor)
    if layout in _BY_ROWS:
        return _base.values(tensor), _base.crow_indices(tensor), _base.col_indices(tensor)
    return (tensor,)


def shown_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements. A view of a larger tensor has fewer than its storage."""
    return sum(int(one.numel()) * int(one.element_size()) for one in parts_of(tensor))


def gradient_of(one: Any) -> Any:
    """Return a parameter's gradient; ``None`` if there is none, or ``one`` is no tensor."""
    return _base.grad.__get__(one) if is_kind(one, torch.Tensor) else None


def storage_of(tensor: Any) -> int:
    """Return the identity of a tensor's storage; 0 if there is none, as in a wrapper of ``torch.func``."""
    storage = tensor_storage(tensor)
    return 0 if storage is None else int(storage._cdata)


def tensor_storage(tensor: Any) -> Any:
    """Return a tensor's storage; ``None`` if there is none, as in a wrapper of ``torch.func``."""
    if _base.layout.__get__(tensor) is not torch.strided:
        return None
    try:
        return _base.untyped_storage(tensor)
    except RuntimeError:
        return None


def _number(node: Any) -> int:
    return int(own_method(node, "_sequence_nr")())


def _kind(kind: type) -> str | None:
    for base in bases(kind):
        if base is torch.Tensor:
            return "tensor"
        if type(class_namespace(base).get("_sequence_nr")) is MethodDescriptorType:
            return "node"
    return None


def is_scalar(one: Any) -> bool:
    """Return whether an object is a tensor without dimensions. Return False for other objects."""
    if not is_kind(one, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return bool(torch._C.TensorBase.ndim.__get__(one) == 0)  # type: ignore[attr-defined] # no stub has it
