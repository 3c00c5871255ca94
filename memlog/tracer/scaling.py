"""How each storage grows with the batch, as far as shapes tell.

Most of what a pass makes grows in proportion, which is what the analysis takes for granted. Two kinds do not:
what is made of parameters and buffers alone (a copy of a queue, a mean of weights), and what has the batch's
size twice (how alike its members are, as contrastive losses have it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from memlog.analysis.trace.stream import BUFFER, GRADIENT, OPTIMIZER_STATE, PARAMETER
from memlog.analysis.trace.uses import FIXED, IN_PROPORTION, MAY_BE_SQUARED, SQUARED
from memlog.tracer.storages import tensors_in

if TYPE_CHECKING:
    from memlog.tracer.ledger import Known, Ledger

_OF_THE_MODEL: Final = frozenset((PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE))
_SMALL: Final = 256
"""Numbers; what is smaller does not matter."""
_MATRIX: Final = 2
_VIEWS: Final = 2
"""Of each member that are compared with each other, as in SimCLR."""
_OTHERS: Final = (-2, -1, 0, 1)
"""A row may leave out the member itself and its other view, or have one more positive."""
_MOST_CHOSEN: Final = 4
"""One such part of a square or more, such as the places that a mask chooses, is a square, too; sums of its
rows are not."""
_POINTWISE: Final = 1
_PRODUCT: Final = 2
_SELDOM: Final = 3
"""Neither."""
_PRODUCTS: Final = frozenset(("mm", "addmm", "bmm", "baddbmm"))


class Scaling:
    """Notes it of the results of operations.

    Args:
        books: Whose notes on storages are kept up to date.
    """

    def __init__(self, books: Ledger) -> None:
        self._books = books
        self._batches: set[int] = set()
        self._rows: set[int] = set()
        self._sizes: set[int] = set()
        self._correlations: set[tuple[int, ...]] = set()

    def of_the_model(self, tensor: Tensor) -> None:
        """A parameter, buffer or gradient is heard of: none of its sizes is the batch's."""
        self._sizes.update(tensor.shape)

    def module_begins(self, tensors: Sequence[Tensor], *, outermost: bool) -> None:
        """A module is called with tensors, the first of which comes last.

        The batch's size is the first of the first one's. Where a model gets them by name, they are not known,
        and the first module inside it that gets one otherwise tells.
        """
        if not tensors or not tensors[-1].ndim or not (outermost or not self._batches):
            return
        batch, *others = tensors[-1].shape
        if outermost:
            self._sizes.update(others)
        if batch > 1:
            self._batches |= {views * batch for views in range(1, _VIEWS + 1)}
            self._rows = {batch + more for batch in self._batches for more in _OTHERS}

    def operation(self, func: Any, args: Any, out: Any, *, outside: bool, before: int) -> int:
        """An operation has run.

        Args:
            func: It.
            args: Its positional arguments.
            out: What it has returned.
            outside: Whether it ran in no module.
            before: The last serial before it.

        Returns:
            How what it takes inside itself grows.
        """
        grows = IN_PROPORTION
        for tensor in tensors_in(out):
            known = self._books.known(tensor)
            if known is not None and known.serial > before:
                known.grows = self._squared(tensor.shape, outside=outside)
                if not known.grows and tensor.numel() >= _SMALL and self._batches:
                    known.grows = self._as_given(func, args, tensor, outside=outside)
                grows = known.grows
        return grows

    def _squared(self, shape: Sequence[int], *, outside: bool) -> int:
        """Inside modules heads and channels may be as many as the batch, so matrices alone count there."""
        if len(shape) == 1:
            return self._squared_and_flat(shape[0])
        two = tuple(shape[:_MATRIX])
        if len(two) < _MATRIX or (len(shape) > _MATRIX and not outside):
            return IN_PROPORTION
        if two[0] not in self._batches or two[1] not in self._rows:
            return IN_PROPORTION
        return SQUARED if self._sizes.isdisjoint(two) else IN_PROPORTION

    def _squared_and_flat(self, length: int) -> int:
        """What a mask has chosen of each row."""
        chosen = (size * (size + more) for size in self._batches for more in _OTHERS)
        return SQUARED if length in chosen and length not in self._sizes else IN_PROPORTION

    def _as_given(self, func: Any, args: Any, out: Tensor, *, outside: bool) -> int:
        """Tell it of a result by what it was made of."""
        role = _roles.get(func)
        if role is None:
            role = _roles[func] = _role_of(func)
        given = [tensor for tensor in tensors_in(args) if tensor.ndim]
        if self._is_fixed(role, given, out):
            return FIXED
        if role == _PRODUCT:
            return MAY_BE_SQUARED if outside and self._may_compare(out.shape) else IN_PROPORTION
        squares = (SQUARED, MAY_BE_SQUARED)
        found = (self._grows(one) for one in given if one.numel() <= _MOST_CHOSEN * out.numel())
        return next((grows for grows in found if grows in squares), IN_PROPORTION)

    def _may_compare(self, shape: Sequence[int]) -> bool:
        """Whether what a loss multiplies may be members with members, or with as many classes."""
        return len(shape) == _MATRIX and shape[0] in self._batches and shape[1] in self._rows

    def _grows(self, tensor: Tensor) -> int:
        known = self._books.known(tensor)
        return IN_PROPORTION if known is None else known.grows

    def _is_fixed(self, role: int, given: Sequence[Tensor], out: Tensor) -> bool:
        if role == _POINTWISE:
            if tuple(out.shape) in self._correlations:
                return True
            return any(one.shape == out.shape and self._is_of_the_model(one) for one in given)
        if role == _PRODUCT and self._adds_up_the_batch(given, out.shape):
            return True
        if not all(map(self._is_of_the_model, given)):
            return False
        if any(one.shape == out.shape for one in given):
            return True
        most = max((one.numel() for one in given), default=0)
        return self._batches.isdisjoint(out.shape) and (role == _PRODUCT or out.numel() <= most)

    def _adds_up_the_batch(self, given: Sequence[Tensor], shape: Sequence[int]) -> bool:
        """Whether a product is of features with features, as in Barlow Twins, not of members with weights.

        Of more dimensions it may be attention, in which a head's size is the batch's by chance.
        """
        if len(shape) != _MATRIX or not self._sizes.issuperset(shape):
            return False
        inner = given[0].shape[0]  # the last argument is the first here
        if inner in self._batches and inner not in self._sizes:
            self._correlations.add(tuple(shape))
        return tuple(shape) in self._correlations

    def _is_of_the_model(self, tensor: Tensor) -> bool:
        """Whether it is a storage of fixed size, or a part of one that is not as long as the batch.

        What is expanded, to the batch's size maybe, is larger than its storage.
        """
        known = self._books.known(tensor)
        if known is None or not _is_fixed(known) or tensor.nbytes > known.size:
            return False
        return tensor.nbytes == known.size or self._batches.isdisjoint(tensor.shape)


def _is_fixed(known: Known) -> bool:
    return known.grows == FIXED or known.category in _OF_THE_MODEL


_roles: dict[Any, int] = {}


def _role_of(func: Any) -> int:
    if torch.Tag.pointwise in getattr(func, "tags", ()):
        return _POINTWISE
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    return _PRODUCT if name in _PRODUCTS else _SELDOM
