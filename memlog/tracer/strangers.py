"""Tensors that a traced step uses and that are in no figure of it, such as a data set of the program's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from memlog.tracer.ledger import MOST_LIVE, Ledger
from memlog.tracer.storages import is_wrapper


class Strangers:
    """Counts their storages, once each.

    Args:
        books: The storages that are in the figures.
    """

    def __init__(self, books: Ledger) -> None:
        self._books = books
        self._sizes: dict[int, int] = {}

    def use(self, tensors: Iterable[Tensor]) -> None:
        """An operation is given tensors. Those on memory that is not torch's do not count."""
        for tensor in tensors:
            plain = tensor.is_cpu and tensor.layout is torch.strided
            if plain and not is_wrapper(type(tensor)) and self._books.known(tensor) is None:
                storage = tensor.untyped_storage()
                if storage.resizable() and len(self._sizes) < MOST_LIVE:
                    self._sizes[storage._cdata] = storage.nbytes()

    @property
    def beside(self) -> int:
        """Bytes of all of them."""
        return sum(self._sizes.values())
