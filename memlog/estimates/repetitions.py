"""Cache of the results of operations on fake tensors. memlog makes a known result again faster than torch.

Results follow from the shapes and types of an operation's arguments. Some operations return only tensors with
the shapes of their arguments. For these operations, one result from torch is enough for all shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from memlog.estimates.fake_mode import FakeMode

Repetition = Callable[..., Any]
"""Function that makes the results of an operation again. It gets the `FakeMode` and the arguments of
``__torch_dispatch__``."""

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_UNMARKED_VIEWS: Final = ("aten::_unsafe_view", "aten::unsafe_split")
"""Operations whose results share the storage of an argument, but which torch does not mark as views."""
_LIKE_ARGUMENTS: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("hardswish", "hardswish_", "hardswish_backward", "hardsigmoid_backward"),
        *("leaky_relu_backward", "elu_backward", "softplus_backward", "native_dropout"),
        *("zeros_like", "ones_like", "empty_like", "zero_", "fill_", "copy_"),
    )
)
"""Operations whose results have the shape of the arguments, but which torch does not mark as pointwise."""
_NORMALISATIONS: Final = frozenset(("aten::native_batch_norm", "aten::native_batch_norm_backward"))
"""Operations with only two shapes of arguments and results: the input's shape, and one value per channel."""
_MOST: Final = 100_000
"""Maximum number of entries in `_known` (about 100 MB). Further results are not remembered."""

_known: dict[tuple[Any, ...], Repetition] = {}
"""Repetitions. The key is the operation with the shapes, strides, types and values of its arguments."""
_known_for_all_shapes: dict[tuple[Any, ...], _LikeArguments] = {}
"""Results for any shape. The key is the operation with the types and values of its arguments. The arguments
must be stored row by row."""


def known(key: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> Repetition | None:
    """Return a function that makes an operation's results; ``None`` if they are not known yet.

    ``key`` has the operation and everything that its results depend on. Shapes and strides are tuples.
    Nothing else in the key is a tuple.
    """
    again = _known.get(key)
    if again is None:
        if func.is_view or func.name().startswith(_UNMARKED_VIEWS):
            again = _view
        else:
            given = _fakes((args, kwargs))
            like = _known_for_all_shapes.get(_without_shapes(key, func, given))
            again = None if like is None else like.repetition(given)
        if again is not None and len(_known) < _MOST:
            _known[key] = again
    return again


def learn(
    key: tuple[Any, ...], mode: FakeMode, func: Any, args: Any, kwargs: Any, out: Any
) -> None:
    """Remember an operation's result ``out``. The other arguments are as in `known`."""
    given = _fakes((args, kwargs))
    again = _repetition(mode, given, args, out)
    if len(_known) < _MOST:
        _known[key] = again
        shapeless = _without_shapes(key, func, given)
        if shapeless and (like := _LikeArguments.of(again, given)) is not None:
            _known_for_all_shapes[shapeless] = like


def _fakes(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, FakeTensor)]


def _without_shapes(key: tuple[Any, ...], func: Any, given: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return a key without shapes; an empty key if torch must make the results for each shape."""
    if not given or not all(_is_row_by_row(one) for one in given):
        return ()
    shape, name = given[0].shape, func.name().partition(".")[0]
    if name in _NORMALISATIONS:
        shapes = {shape, shape[1:2]}
    elif torch.Tag.pointwise in func.tags or name in _LIKE_ARGUMENTS:
        shapes = {shape}
    else:
        return ()
    if not all(one.shape in shapes for one in given):
        return ()
    rest = (value for value in key if not isinstance(value, tuple))
    return (*rest, *(one.ndim for one in given))


def _is_row_by_row(tensor: Tensor) -> bool:
    """Return whether a tensor has exactly the strides that a new tensor of its shape has."""
    return tensor.stride() == torch.empty(tensor.shape, device=_META).stride()


@dataclass(frozen=True)
class _NewTensors:
    """`Repetition` that makes new tensors: one, or a list or tuple of them."""

    shapes: Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]
    sequence: Callable[[Any], Any] | None

    def __call__(self, mode: FakeMode, *_: Any) -> Any:
        made = (one and mode.empty(*one) for one in self.shapes)
        return next(made) if self.sequence is None else self.sequence(made)


class _LikeArguments(NamedTuple):
    """Known results that hold for arguments of any shape. Each result has the layout of an argument."""

    again: Repetition
    """Function that makes the results for the shapes of the first call."""
    places: Sequence[int | None] = ()
    """Index of an argument for each new tensor. The tensor gets the shape and strides of this argument."""

    @classmethod
    def of(cls, again: Repetition, given: Sequence[Tensor]) -> _LikeArguments | None:
        """Extend ``again`` to any shape. Return ``None`` if this is not possible."""
        if again in (_nothing, _first_argument):
            return cls(again)
        if not isinstance(again, _NewTensors):
            return None
        layouts = [(one.shape, one.stride()) for one in given]
        if not all(one is None or one[:2] in layouts for one in again.shapes):
            return None
        return cls(again, [one and layouts.index(one[:2]) for one in again.shapes])

    def repetition(self, given: Sequence[Tensor]) -> Repetition:
        if not isinstance(self.again, _NewTensors):
            return self.again
        shapes = [
            None if at is None or one is None else (given[at].shape, given[at].stride(), one[2])
            for at, one in zip(self.places, self.again.shapes, strict=True)
        ]
        return _NewTensors(shapes, self.again.sequence)


def _repetition(mode: FakeMode, given: Sequence[Tensor], args: Any, out: Any) -> Repetition:
    """Return a function that makes results like torch's, for arguments of the same shapes and types."""
    if out is None:
        return _nothing
    if args and out is args[0]:
        return _first_argument
    # A decomposition may return a named tuple, but the operation itself returns a plain one.
    sequence = next((kind for kind in (list, tuple) if isinstance(out, kind)), None)
    made = out if sequence else (out,)
    taken = {one.untyped_storage()._cdata for one in given}
    if not all(one is None or _is_new(mode, one, taken) for one in made):
        return _by_torch
    shapes = [one if one is None else (one.shape, one.stride(), one.dtype) for one in made]
    return _NewTensors(shapes, sequence)


def _is_new(mode: FakeMode, result: Any, taken: set[int]) -> bool:
    """Return whether a result can be made again from its shape and type alone.

    ``taken`` has the storages of the arguments and of earlier results, and gets the storage of a new result.
    """
    if (
        type(result) is not FakeTensor
        or result.constant is not None
        or result.layout is not torch.strided
        or result.dtype.is_complex
        or result.is_quantized
        or result.fake_device != _CPU
        or result.storage_offset()
    ):
        return False
    storage = result.untyped_storage()
    again = mode.empty(result.shape, result.stride(), result.dtype).untyped_storage()
    new = storage._cdata not in taken and storage.nbytes() == again.nbytes()
    taken.add(storage._cdata)
    return new


def _view(mode: FakeMode, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return mode.wrap(out)
    return type(out)(mode.wrap(one) for one in out)


def _nothing(*_: Any) -> None:
    """`Repetition` of an operation that only changes values and returns nothing."""


def _first_argument(_mode: FakeMode, _func: Any, _types: Any, args: Any, _kwargs: Any) -> Any:
    return args[0]


def _by_torch(mode: FakeMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return mode.by_torch(func, types, args, kwargs)
