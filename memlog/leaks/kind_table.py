"""Fast selection of objects by their type. A program has hundreds of thousands of objects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from memlog.leaks.time_budget import TimeBudget

_Kind = TypeVar("_Kind")


class KindTable(Generic[_Kind]):
    """Table that maps types to kinds, and selects objects by the kind of their type.

    ``kind_of`` returns the kind of a type, for example the same kind for all subclasses of ``torch.Tensor``;
    ``None`` if objects of the type are of no interest.

    Types are compared by identity. They are not hashed, because hashing can run the code of a metaclass.
    """

    def __init__(self, kind_of: Callable[[type], _Kind | None]) -> None:
        self._kind_of = kind_of
        self._seen: dict[int, type] = {}
        self._kinds: dict[int, _Kind] = {}

    def select_until_spent(
        self, objects: Sequence[Any], budget: TimeBudget
    ) -> Iterator[tuple[Any, _Kind]]:
        """Yield the objects of interest, each with its kind, until the time of ``budget`` is spent."""
        for batch in budget.batches(objects):
            yield from self.select(batch)

    def select(self, objects: Sequence[Any]) -> Iterator[tuple[Any, _Kind]]:
        """Yield the objects of interest, each with its kind."""
        types = list(map(type, objects))
        numbers = list(map(id, types))
        present = dict(zip(numbers, types, strict=True))
        for number in present.keys() - self._seen.keys():
            self._add(number, present[number])
        kinds = self._kinds
        if present.keys().isdisjoint(kinds):
            return
        # Most objects are of no interest. The C function `compress` skips them faster than this loop could.
        pairs = zip(objects, numbers, strict=True)
        for one, number in itertools.compress(pairs, map(kinds.__contains__, numbers)):
            yield one, kinds[number]

    def _add(self, number: int, kind: type) -> None:
        self._seen[number] = kind
        found = self._kind_of(kind)
        if found is not None:
            self._kinds[number] = found
