"""Lengths of a data set's samples, as the objects of a data loader tell them.

Nothing iterates the data, and none of the program's code runs: only instance attributes of the loader, its
samplers, its data set and its collator are read, and columns of Hugging Face's ``datasets.Dataset``.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from array import array
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import bases, instance_dict, is_kind, type_name
from memlog._internal.replacements import Replacements
from memlog.events import SampleLengths

_MODULE = "torch.utils.data.dataloader"
_LOADERS = 8
"""Maximum number of iterators to remember."""
_DEPTH = 4
"""Maximum number of samplers within samplers."""
_FEWEST = 32
"""If an attribute has fewer numbers than this, they are not taken for the lengths of samples."""
_MOST, _MOST_IN_ARRAY = 500_000, 5_000_000
"""If there are more samples than this, their lengths are not read: the first number is for lists and tuples,
whose numbers take about 0.1 s, the second one for arrays and columns."""
_SECONDS = 0.05
"""Maximum time for reading the lengths of samples that are in a list."""
_SAMPLED = 50_000
"""Number of lengths that are sorted, evenly chosen among all."""
_COLUMNS = ("length", "lengths", "num_tokens", "n_tokens", "input_ids", "tokens", "input_values")
_ATTRIBUTES = ("lengths", "sizes")
_MAXIMA = ("max_length", "max_seq_length", "max_seq_len")


class LoaderWatch:
    """Watch over the data loaders that are iterated, from `begin` to `stop`. No method raises."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._replaced = Replacements()
        self._iterators: list[weakref.ref[Any]] = []
        """Iterators of loaders, those that began first come first. A loader itself may be gone by now."""
        self._known: weakref.WeakKeyDictionary[Any, SampleLengths | None] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self) -> None:
        """Notice when a loader's iteration begins, as soon as torch's data loader is imported."""
        self._replaced.when_imported([_MODULE], self._imported)

    def stop(self) -> None:
        self._replaced.undo()
        self._iterators.clear()

    def lengths(self) -> SampleLengths | None:
        """Return the lengths of the samples of a loader that is iterated now; ``None``: unknown."""
        for reference in list(self._iterators):
            one = reference()
            if one is None:
                continue
            with self._diagnostics.contained("reading the lengths of samples"):
                if one not in self._known:
                    self._known[one] = lengths_of(one)
                if (found := self._known[one]) is not None:
                    return found
        return None

    def _imported(self, module: Any) -> None:
        with self._diagnostics.contained("noticing data loaders"):
            original = module.DataLoader.__iter__

            @functools.wraps(original)
            def iterating(loader: Any) -> Any:
                iterator = original(loader)
                if self._replaced:
                    with suppress(TypeError):  # an object without weak references
                        self._note(weakref.ref(iterator))
                return iterator

            self._replaced.replace(module.DataLoader, "__iter__", iterating)

    def _note(self, new: weakref.ref[Any]) -> None:
        alive = [each for each in self._iterators if each() is not None and each() is not new()]
        self._iterators = [*alive, new][-_LOADERS:]


def lengths_of(iterator: object) -> SampleLengths | None:
    """Return the lengths of the samples of a data loader that ``iterator`` iterates.

    ``None``: they are unknown, or not cheap to read.
    """
    attributes = instance_dict(iterator) or {}
    own = {name: attributes.get(f"_{name}") for name in ("index_sampler", "dataset", "collate_fn")}
    of_sampler = next(_of_samplers(own["index_sampler"]), None)
    found = of_sampler or next(_of_data(own["dataset"]), None)
    most = _maximum(own["collate_fn"])
    if found is None:
        return None if most is None else SampleLengths(f"the collator's {most[0]}", most[1], 0)
    source, lengths = found
    longest = int(lengths.max() if hasattr(lengths, "max") else max(lengths))
    step = -(-len(lengths) // _SAMPLED)
    ordered = sorted(map(int, lengths[::step]), reverse=True)
    tail, share = [], 0.5
    while share * len(ordered) >= 1:
        tail.append(ordered[ceil(share * len(ordered)) - 1])
        share /= 2
    if most is not None and most[1] < longest:
        source, longest = f"{source}, truncated to the collator's {most[0]}", most[1]
        tail = [min(one, longest) for one in tail]
    return SampleLengths(
        source,
        longest,
        len(lengths),
        tuple(tail),
        _is_of_torch(own, "RandomSampler", "DistributedSampler"),
        of_sampler is not None
        or _is_of_torch(own, "RandomSampler", "DistributedSampler", "SequentialSampler"),
    )


def _of_data(data: object) -> Iterator[tuple[str, Any]]:
    """Yield the lengths that a data set tells, with their sources."""
    for found in (_of_columns(data), _of_list(data)):
        if found is not None:
            yield found
    yield from _of_attributes(data)


def _of_samplers(sampler: object) -> Iterator[tuple[str, Any]]:
    """Yield the lengths that a sampler and the samplers within it tell, with their sources."""
    for _ in range(_DEPTH):
        yield from _of_attributes(sampler)
        inner = instance_dict(sampler) or {}
        sampler = inner.get("batch_sampler", inner.get("sampler"))


def _of_attributes(value: object) -> Iterator[tuple[str, Any]]:
    own = instance_dict(value) or {}
    for name in _ATTRIBUTES:
        lengths = own.get(name)
        if _are_lengths(lengths):
            yield f"`{name}` of {type_name(value)}", lengths


def _are_lengths(values: Any) -> bool:
    """Return True for a list, tuple or one-dimensional array of enough whole numbers, none below zero."""
    if type(values) in (list, tuple):
        right = _FEWEST <= len(values) <= _MOST and set(map(type, values)) == {int}
        return right and min(values) >= 0
    if type(values) is array:
        right = _FEWEST <= len(values) <= _MOST and values.typecode in "bBhHiIlLqQ"
        return right and min(values) >= 0
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(values) is numpy.ndarray
        and values.ndim == 1
        and values.dtype.kind in "iu"
        and _FEWEST <= len(values) <= _MOST_IN_ARRAY
        and bool(values.min() >= 0)
    )


def _of_columns(data: object) -> tuple[str, Any] | None:
    """Return the lengths in a column of a Hugging Face data set. Only the offsets of lists are read."""
    kind = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    compute: Any = sys.modules.get("pyarrow.compute")
    if kind is None or compute is None or not is_kind(data, kind):
        return None
    own = instance_dict(data) or {}
    table: Any = (instance_dict(own.get("_data")) or {}).get("table")
    arrow: Any = sys.modules["pyarrow"]
    if type(table) is not arrow.Table or table.num_rows > _MOST_IN_ARRAY:
        return None
    for name in _COLUMNS:
        if name not in table.column_names:
            continue
        column = table.column(name)
        if arrow.types.is_list(column.type) or arrow.types.is_large_list(column.type):
            column = compute.list_value_length(column)
        elif not arrow.types.is_integer(column.type):
            continue
        indices = (instance_dict(own.get("_indices")) or {}).get("table")
        if indices is not None:
            column = column.take(indices.column(0))
        lengths = column.drop_null().to_numpy()
        if _are_lengths(lengths):
            return f"the column `{name}` of the data set", lengths
    return None


def _of_list(data: object) -> tuple[str, Any] | None:
    """Return the lengths of samples that are in a list: lists or tensors, or dicts with ``input_ids``."""
    if type(data) is not list or not _FEWEST <= len(data) <= _MOST:
        return None
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    lengths, end = array("q"), time.perf_counter() + _SECONDS
    for at, sample in enumerate(data):
        if not at % 1024 and time.perf_counter() > end:
            return None
        value: Any = sample.get("input_ids") if type(sample) is dict else sample
        if type(value) is list:
            lengths.append(len(value))
        elif type(value) is tensor and value.dim() == 1:
            lengths.append(value.shape[0])
        else:
            return None
    return ("the samples in the data set's list", lengths) if _are_lengths(lengths) else None


def _maximum(collator: object) -> tuple[str, int] | None:
    """Return the length to which a collator truncates, with the attribute's name; ``None``: unknown."""
    own = instance_dict(collator) or {}
    if own.get("truncation") not in (True, "longest_first", "only_first"):
        return None
    known = ((f"`{name}`", own.get(name)) for name in _MAXIMA)
    return next(((name, most) for name, most in known if type(most) is int and most > 0), None)


def _is_of_torch(own: dict[str, Any], *names: str) -> bool:
    """Return True if one of torch's own samplers, of these names, chooses each batch's samples."""
    samplers: Any = sys.modules.get("torch.utils.data.sampler")
    batches = own["index_sampler"]
    return (
        samplers is not None
        and type(batches) is samplers.BatchSampler
        and any(
            base.__name__ in names and base.__module__.startswith("torch.")
            for base in bases(type((instance_dict(batches) or {}).get("sampler")))
        )
    )
