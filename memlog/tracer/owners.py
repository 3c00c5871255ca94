"""Which module each parameter belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memlog.analysis.trace.stream import OUTSIDE
from memlog.tracer.names import ModuleNames


class Owners:
    """The parameters of the model in a window, known by identity and held weakly.

    Args:
        names: Which module is which layer.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def adopt(self, model: Any) -> list[tuple[Tensor, int]]:
        """Gets to know a model; its parameters, each with its layer."""
        found = []
        for name, parameter in model.named_parameters():
            layer = self._names.owner_of(name)
            self._known[id(parameter)] = (weakref.ref(parameter), layer)
            found.append((parameter, layer))
        return found

    def buffers(self, model: Any) -> list[tuple[Tensor, int]]:
        """A model's buffers, each with its layer."""
        return [(buffer, self._names.owner_of(name)) for name, buffer in model.named_buffers()]

    def parameters(self) -> Iterator[tuple[Tensor, int]]:
        """Those that are still there, each with its layer."""
        for reference, layer in list(self._known.values()):
            parameter = reference()
            if parameter is not None:
                yield parameter, layer

    def of(self, parameter: Any) -> int:
        """The layer of a parameter; "outside" for one that is not the model's."""
        known = self._known.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else OUTSIDE
