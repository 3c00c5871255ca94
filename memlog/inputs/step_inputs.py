"""Inputs of a step that has just ended or failed, and the lengths of a data set's samples.

The search runs no code of the program. It calls only C-level functions of Python's own types. It switches off
overrides of ``__torch_function__``, and reads only plain tensors.

Nothing iterates the data, and none of the program's code runs: only instance attributes of the loader, its
samplers, its data set and its collator are read, and columns of Hugging Face's ``datasets.Dataset``.
"""

from __future__ import annotations

import functools
import re
import sys
import time
import weakref
from array import array
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from inspect import CO_OPTIMIZED
from itertools import islice
from math import ceil, prod
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import (
    bases,
    class_namespace,
    instance_dict,
    is_kind,
    local_variables,
    type_name,
)
from memlog._internal.replacements import Replacements
from memlog.events import SampleLengths, TensorInput
from memlog.torchside.loaded import without_functions_of_subclasses

_FRAMES = 64
"""Maximum number of frames to look at."""
_MOST_VARIABLES = 300
"""Maximum number of variables to read in a frame."""
_INPUTS = 12
"""Maximum number of inputs to return. Further inputs are left out."""
_MODULE_CALL = "_call_impl"
"""Function of ``torch.nn.Module`` that runs a module's ``forward``."""
_MEMLOG = str(Path(__file__).parents[1]) + "/"


def inputs_at_step_end() -> tuple[tuple[TensorInput, ...], list[Any]]:
    """Return the tensors among the variables of the functions that called the optimizer's step.

    The first part of the result describes them, the second part has the tensors themselves. The variables of
    the innermost function come first. Tensors that require gradients, such as parameters, do not count as
    inputs.
    """
    if "torch" not in sys.modules:
        return (), []
    finder = TensorFinder()
    for frame in program_frames(_outwards(sys._getframe(1))):  # noqa: SLF001 - inspect's is the same
        finder.add(variables_of(frame))
    return tuple(finder.found[:_INPUTS]), finder.tensors[:_INPUTS]


def inputs_of_failure(frames: Iterable[FrameType]) -> tuple[TensorInput, ...]:
    """Return the inputs of a step that failed. ``frames`` is the failure's call stack, outermost frame first.

    The first inputs are tensors in variables of the program's functions, outside the model. The model's
    arguments follow. Each tensor is returned only once.

    If torch's code did not run when the step failed, the step had possibly not got its inputs yet, and the
    variables can be those of the step before. The result is empty then.
    """
    frames = list(frames)
    if not any(map(_is_of_a_step, frames)):
        return ()
    outside: list[FrameType] = []
    inside: list[FrameType] = []
    for frame in frames:
        if inside or frame.f_code.co_name == _MODULE_CALL:
            inside.append(frame)
        else:
            outside.append(frame)
    finder = TensorFinder()
    for frame in program_frames(reversed(outside)):
        finder.add(variables_of(frame))
    if inside:
        finder.add(_arguments(inside))
    return tuple(finder.found[:_INPUTS])


def _is_of_a_step(frame: FrameType) -> bool:
    """Return True if the frame runs torch's code, other than the code that loads data."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    root = str(Path(torch.__file__).parent) + "/"
    file = frame.f_code.co_filename
    return file.startswith(root) and not file.startswith(f"{root}utils/data/")


def _arguments(frames: list[FrameType]) -> list[tuple[str, object]]:
    """Return the arguments of the outermost module call, named as in its ``forward``."""
    held = local_variables(frames[0])
    positional, by_name = held.get("args"), held.get("kwargs")
    names: tuple[str, ...] = ()
    # If hooks for all modules are registered, torch calls `forward` through one more function.
    codes = [frame.f_code for frame in frames[1:3] if frame.f_code.co_name == "forward"]
    if codes:
        # The first argument is `self`.
        names = codes[0].co_varnames[1 : codes[0].co_argcount]
    arguments: list[tuple[str, object]] = []
    if type(positional) is tuple:
        named = (*names, *(f"args[{at}]" for at in range(len(names), len(positional))))
        arguments += zip(named, positional, strict=False)
    if type(by_name) is dict:
        arguments += by_name.items()
    return arguments


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """Return the names and values of a frame's variables.

    If the frame runs a Python file's top-level code, return only the variables that this code uses.
    """
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        return list(local_variables(frame).items())[:_MOST_VARIABLES]
    namespace = frame.f_locals  # the namespace of a module or class itself, not a copy
    if type(namespace) is not dict:
        return []
    return [
        (name, namespace[name]) for name in code.co_names[:_MOST_VARIABLES] if name in namespace
    ]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def program_frames(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Look at the first `_FRAMES` frames. Yield those that run neither torch's code nor memlog's code."""
    torch: Any = sys.modules.get("torch")
    foreign = (_MEMLOG,) if torch is None else (_MEMLOG, str(Path(torch.__file__).parent) + "/")
    for frame in islice(frames, _FRAMES):
        if not frame.f_code.co_filename.startswith(foreign):
            yield frame


_DEPTH = 3
"""Maximum depth of containers in containers. Deeper values are not looked at."""
_ITEMS = 16
"""Containers with more items than this are not searched: they are data sets or histories, not batches."""
_VALUES = 2_000
"""Maximum number of values to look at in one search."""
_FOUND = 32
"""Maximum number of tensors to find in one search."""
_NAME = 60
"""Maximum number of characters in a tensor's name. Tensors with longer names are left out."""
_WITHOUT_TENSORS = frozenset(
    id(kind)
    for kind in (
        *(int, float, bool, str, bytes, complex, range, type(None), type, set, frozenset),
        *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    )
)
"""Identities of types whose instances contain no tensors. The types themselves are not compared, because a
metaclass can define ``__eq__`` and ``__hash__``."""


class TensorFinder:
    """Finder of the plain tensors among some variables.

    Make a new finder for each search. A finder recognises objects by their ids, so the caller must keep the
    objects alive until the search has ended.
    """

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._seen: set[int] = set()
        self._looked_at = 0
        self.found: list[TensorInput] = []
        self.tensors: list[Any] = []
        """The tensors of `found`."""

    def add(self, variables: Iterable[tuple[str, object]]) -> None:
        """Add the tensors of some variables. A tensor with several names is added under the first name."""
        if self._torch is None:
            return
        with without_functions_of_subclasses(self._torch):
            for name, value in variables:
                self._add(name, value, _DEPTH)

    def _add(self, name: str, value: object, depth: int) -> None:
        kind = type(value)
        if id(kind) in _WITHOUT_TENSORS or self._is_full():
            return
        if kind is self._torch.Tensor:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._add_tensor(name, value)
        elif depth:
            for item, inner in _items(name, value):
                self._add(item, inner, depth - 1)

    def _is_full(self) -> bool:
        self._looked_at += 1
        return self._looked_at > _VALUES or len(self.found) >= _FOUND

    def _add_tensor(self, name: str, tensor: Any) -> None:
        if tensor.requires_grad or tensor.is_nested or not tensor.dim() or len(name) > _NAME:
            return
        shape = tuple(int(size) for size in tensor.shape)
        self.found.append(TensorInput(name, shape, str(tensor.dtype).removeprefix("torch.")))
        self.tensors.append(tensor)


def _items(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the items of a container with their names; nothing if ``value`` is no container, or too large."""
    if is_kind(value, dict):
        yield from _dict_items(name, cast("dict[object, object]", value))
    elif is_kind(value, list):
        yield from _sequence_items(name, list.__iter__(cast("list[object]", value)))
    elif is_kind(value, tuple):
        yield from _sequence_items(name, tuple.__iter__(cast("tuple[object, ...]", value)))
    elif is_kind(value, UserDict):  # such as ``BatchEncoding`` of Hugging Face
        inner = dict(_attributes(value)).get("data")
        if type(inner) is dict:
            yield from _dict_items(name, inner)
    elif any("__dataclass_fields__" in class_namespace(base) for base in bases(type(value))):
        yield from ((f"{name}.{field}", item) for field, item in _attributes(value))


def _dict_items(name: str, values: dict[object, object]) -> Iterator[tuple[str, object]]:
    if dict.__len__(values) > _ITEMS:
        return
    # A copy, because another thread can change the dictionary.
    for key, value in list(dict.items(values)):
        if type(key) is str and key.isprintable():
            yield f'{name}["{key}"]', value
        elif type(key) is int:
            yield f"{name}[{key}]", value


def _sequence_items(name: str, values: Iterator[object]) -> Iterator[tuple[str, object]]:
    # One item more than the maximum shows that there are too many.
    items = list(islice(values, _ITEMS + 1))
    if len(items) <= _ITEMS:
        yield from ((f"{name}[{at}]", item) for at, item in enumerate(items))


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return an instance's own attributes without calling properties or ``__getattribute__``."""
    own = instance_dict(value)
    if own is None or len(own) > _ITEMS:
        return []
    return [(name, item) for name, item in list(own.items()) if type(name) is str]


_LOOKS = 2
"""If something grew at this number of looks in a row, it keeps what earlier steps made."""
_OWN = 0.4
"""If a variable's tensor grows at each look, and this part of the peaks' rise is its own bytes, it is kept.
``torch.cat`` has the old tensor beside the new one, so a half of the rise is the new one's. A model needs
several times the memory of its inputs."""


class KeptTensors:
    """Watch over the tensors that are seen at the ends of steps."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._gains: Counter[str] = Counter()
        self._grown: dict[str, _Growth] = {}
        self._at_first: set[str] | None = None
        """Variables at the first look; ``None``: there was none yet."""
        self._stayed: set[str] = set()
        """Variables that came after the first look and had the same tensor at two looks."""

    def inputs_among(
        self, found: tuple[TensorInput, ...], peak: int, fresh: frozenset[str]
    ) -> tuple[TensorInput, ...]:
        """Return the tensors that are inputs of this step. ``peak`` is the step's peak in bytes.

        ``fresh`` has the names of the tensors that were not there at the last look.

        The items of a container that gains items from look to look are left out, and so is a variable's
        tensor whose own growth explains the peaks. A container that was not there at the last look has
        gained its items since. A variable that comes after the first look and then has the same tensor at
        two looks has a copy or a result, such as a checkpoint: it is left out from then on.
        """
        is_first = self._at_first is None
        if self._at_first is None:
            self._at_first = {_variable(tensor) for tensor in found}
        old = {_variable(tensor) for tensor in found if tensor.name not in fresh}
        self._stayed |= old - self._at_first
        held = Counter(container for tensor in found if (container := _container(tensor)))
        for name, count in held.items():
            if count > self._held.get(name, count if is_first else 0):
                self._gains[name] += 1
            elif self._gains[name] < _LOOKS:
                self._gains[name] = 0
        self._held = held
        return tuple(
            tensor
            for tensor in found
            if _variable(tensor) not in self._stayed
            and not self._gains[_container(tensor)]
            and not self._explains_peaks(tensor, peak)
        )

    def _explains_peaks(self, each: TensorInput, peak: int) -> bool:
        size = _bytes(each)
        growth = self._grown.get(each.name)
        if growth is None or size < growth.size:
            self._grown[each.name] = _Growth(size, peak)
            return False
        growth.looks += size > growth.size
        growth.size = size
        return growth.looks >= _LOOKS and size - growth.first > _OWN * (peak - growth.peak)


class _Growth:
    """Sizes of a variable's tensor since it shrank last."""

    def __init__(self, size: int, peak: int) -> None:
        self.first = self.size = size
        self.peak = peak
        self.looks = 0


def _container(each: TensorInput) -> str:
    """Return the variable that holds an input as an item; empty if the input is a variable itself."""
    name = _variable(each)
    return "" if name == each.name else name


def _variable(each: TensorInput) -> str:
    return each.name.partition("[")[0]


def _bytes(each: TensorInput) -> int:
    bits = re.search(r"\d+", each.dtype)  # none in ``bool``
    return prod(each.shape) * (1 if bits is None else int(bits[0]) // 8)


_MODULE = "torch.utils.data.dataloader"
_LOADERS = 8
"""Maximum number of iterators to remember."""
_DEPTH_OF_DATA = 4
"""Maximum number of samplers within samplers."""
_FEWEST = 32
"""If an attribute has fewer numbers than this, they are not taken for the lengths of samples."""
_MOST_SAMPLES, _MOST_IN_ARRAY = 500_000, 5_000_000
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
            iterator = reference()
            if iterator is None:
                continue
            with self._diagnostics.contained("reading the lengths of samples"):
                if iterator not in self._known:
                    self._known[iterator] = lengths_of(iterator)
                if (known := self._known[iterator]) is not None:
                    return known
        return None

    def _imported(self, module: Any) -> None:
        with self._diagnostics.contained("noticing data loaders"):
            original = module.DataLoader.__iter__

            @functools.wraps(original)
            def iterating(loader: Any) -> Any:
                iterator = original(loader)
                # After `stop`, another package's replacement can still call this function.
                if self._replaced:
                    with suppress(TypeError):  # an object without weak references
                        self._note(weakref.ref(iterator))
                return iterator

            self._replaced.replace(module.DataLoader, "__iter__", iterating)

    def _note(self, new: weakref.ref[Any]) -> None:
        # With persistent workers, a loader returns the same iterator in each epoch.
        alive = [
            reference
            for reference in self._iterators
            if reference() is not None and reference() is not new()
        ]
        self._iterators = [*alive, new][-_LOADERS:]


def lengths_of(iterator: object) -> SampleLengths | None:
    """Return the lengths of the samples of a data loader that ``iterator`` iterates.

    ``None``: they are unknown, or not cheap to read.
    """
    attributes = instance_dict(iterator) or {}
    own = {name: attributes.get(f"_{name}") for name in ("index_sampler", "dataset", "collate_fn")}
    of_sampler = next(_of_samplers(own["index_sampler"]), None)
    told = of_sampler or next(_of_data(own["dataset"]), None)
    most = _maximum(own["collate_fn"])
    if told is None:
        return None if most is None else SampleLengths(f"the collator's {most[0]}", most[1], 0)
    source, lengths = told
    longest = int(lengths.max() if hasattr(lengths, "max") else max(lengths))
    step = -(-len(lengths) // _SAMPLED)
    ordered = sorted(map(int, lengths[::step]), reverse=True)
    tail, share = [], 0.5
    while share * len(ordered) >= 1:
        tail.append(ordered[ceil(share * len(ordered)) - 1])
        share /= 2
    if most is not None and most[1] < longest:
        source, longest = f"{source}, truncated to the collator's {most[0]}", most[1]
        tail = [min(length, longest) for length in tail]
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
    for told in (_of_columns(data), _of_list(data)):
        if told is not None:
            yield told
    yield from _of_attributes(data)


def _of_samplers(sampler: object) -> Iterator[tuple[str, Any]]:
    """Yield the lengths that a sampler and the samplers within it tell, with their sources."""
    for _ in range(_DEPTH_OF_DATA):
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
        # `isinstance` would accept bool.
        right = _FEWEST <= len(values) <= _MOST_SAMPLES and set(map(type, values)) == {int}
        return right and min(values) >= 0
    if type(values) is array:
        right = _FEWEST <= len(values) <= _MOST_SAMPLES and values.typecode in "bBhHiIlLqQ"
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
    if type(data) is not list or not _FEWEST <= len(data) <= _MOST_SAMPLES:
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
