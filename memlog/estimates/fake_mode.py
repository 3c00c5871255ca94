"""Mode of an estimate's fake tensors, which remembers the results of each operation.

torch takes 0.1 to 5 ms for an operation on fake tensors. The results of an operation follow from the shapes
and types of its arguments, and a training step repeats most operations in every layer.

Results follow from the shapes and types of an operation's arguments. Some operations return only tensors with
the shapes of their arguments. For these operations, one result from torch is enough for all shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memlog.errors import ConfigurationError
from memlog.estimates import cpu_workspaces
from memlog.estimates.as_on_cuda import CORRECTIONS
from memlog.estimates.cpu_workspaces import MAX_REAL_BYTES, bytes_of
from memlog.estimates.cuda_kernels import layers
from memlog.estimates.places import Places
from memlog.torchside.compiled_code import is_planning
from memlog.torchside.fakes import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    allow_reading_the_address,
    in_kernel_invocation_manager,
    make_subclass,
    tree_leaves,
    tree_map_only,
    without_modes,
)
from memlog.torchside.tensors import has_kernel

_aten: Final = torch.ops.aten
_DEVICE: Final = torch.ops.prim.device.default
_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_PLAIN: Final = frozenset(
    (
        *(int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
"""Types of arguments that are compared by value."""


def _size_of_losses(args: Any, out: Tensor) -> int:
    """Return the bytes that torch allocates for a loss function's result: one loss for each value.

    torch then writes the mean or the sum of the losses into the same storage.
    """
    values: int = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return values * out.element_size()


_LARGER_RESULTS: Final[dict[Any, Callable[[Any, Any], int]]] = {
    _aten.col2im.default: lambda args, _: args[0].nbytes,
    _aten.binary_cross_entropy.default: _size_of_losses,
    _aten.mse_loss.default: _size_of_losses,
    _aten.smooth_l1_loss.default: _size_of_losses,
    _aten.soft_margin_loss.default: _size_of_losses,
    _aten.mkldnn_rnn_layer.default: cpu_workspaces.kept,
}
"""Operations whose result has more bytes than its values need. torch's fake result lacks the extra bytes.

Each function gets the operation's arguments and result, and returns the bytes of the real result. If the
result is a tuple, these are the bytes of the last tensor."""


def _fake_quantized(values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def _ctc_loss(
    scores: Tensor, targets: Tensor, _: Any, lengths: Any, *__: Any
) -> tuple[Tensor, Tensor]:
    """Return the losses, and what the derivative needs: a value for each label, and between labels."""
    if targets.ndim > 1:
        longest = targets.shape[1]
    elif isinstance(lengths, Tensor):
        raise ConfigurationError(
            "ctc_loss with concatenated targets and a tensor of lengths: what it allocates depends on the "
            "longest target. Pass the targets with one row for each sample, or the lengths as a tuple"
        )
    else:
        longest = max(lengths, default=0)
    steps, samples = scores.shape[0], scores.shape[1]
    return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * longest + 1)


def _by_rows(_: Tensor, values: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _return_nothing(*_: Any) -> None:
    """Return what an operation returns that changes values only."""


INSTEAD: Final[dict[Any, Callable[..., Any]]] = {
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._pin_memory.default: lambda values, *_: torch.empty_like(values),
    _aten._ctc_loss_backward.default: _by_rows,
    _aten._ctc_loss_backward.Tensor: _by_rows,
    _aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantized,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantized,
    _aten.multi_margin_loss_backward.default: _by_rows,
    _aten.multilabel_margin_loss_backward.default: _by_rows,
}
"""Replacements of operations that torch can't run on fake tensors.

Each function returns tensors with the shapes and types of the operation's results."""

_OF_SPARSE: Final[dict[Any, Callable[..., Any]]] = {
    _aten._sparse_addmm.default: lambda added, *_: torch.empty_like(added),
    _aten.mm.default: lambda sparse, dense: dense.new_empty(sparse.shape[0], dense.shape[1]),
}
"""Replacements of operations that torch can't run only on sparse fake tensors."""

_CONVOLUTIONS: Final[dict[Any, Callable[[Any], Any]]] = {
    _aten.convolution.default: lambda args: args[:2],
    _aten.convolution_backward.default: lambda args: args[1:3],
}
"""Convolutions and their derivative, and functions that return the input and the weight of the arguments."""
_DIFFERENT_ON_CUDA: Final = _CONVOLUTIONS.keys() | CORRECTIONS.keys()
"""Operations with other results on a CUDA device than on the CPU."""

_LAYOUTS: Final[dict[Any, Callable[[Any], torch.memory_format]]] = {
    _aten.native_batch_norm_backward.default: lambda args: layers.suggested(args[1]),
    _aten.native_layer_norm_backward.default: lambda _: torch.contiguous_format,
    _aten.mse_loss_backward.default: lambda _: torch.contiguous_format,
    _aten.smooth_l1_loss_backward.default: lambda _: torch.contiguous_format,
    _aten.huber_loss_backward.default: lambda _: torch.contiguous_format,
}
"""Functions that return the layout of the gradient for the input. torch's fake result has that of the
gradient for the output."""

_WEIGHTS: Final = {
    _aten.native_batch_norm.default: 1,
    _aten.native_group_norm.default: 1,
    _aten.native_layer_norm.default: 2,
}
"""Normalisations, and the index of the weight among their arguments. The returned means and deviations have
the weight's type on real tensors, but the input's type on fake tensors."""


class FakeMode(FakeTensorMode):
    """Mode in which new tensors have shapes but no bytes, and operations get fakes instead of real tensors.

    Attributes:
        convert: Function that replaces a real tensor in an operation's arguments by a fake tensor. ``None``:
            torch makes a new fake tensor for each operation.
        places: Devices on which the tensors would lie; ``None``: nobody asks for them.
        has_real_indices: True if operations whose tensors are real integers of 32 bits run as such.
    """

    def __init__(self, places: Places | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._attributes = vars(FakeTensor(self, torch.empty(0, device=_META), _CPU)).copy()
        # memlog has its own cache. The checks of torch's cache would take more time than that cache saves.
        self.cache_enabled = False
        self.convert: Callable[[Tensor], Tensor] | None = None
        self.places = places
        self.has_real_indices = False

    def __deepcopy__(self, memo: object) -> FakeMode:
        """Return the mode itself, so that the copy of a fake tensor belongs to the same mode."""
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, torch would wrap each call to prevent compilation. But nothing in a call can be compiled.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled functions stay compiled in a mode that is entered now.

        Outside `planned_by_inductor`, their kernels would get tensors without bytes. Older torch does not
        call this.
        """
        return is_planning()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            # Autograd asks for the device several times for each operation.
            return args[0].fake_device
        kwargs = kwargs or {}
        is_fake = FakeTensor in map(type, args)
        if self.has_real_indices and not is_fake and _are_indices((args, kwargs)):
            with without_modes():
                return func(*args, **kwargs)
        if getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs = {
                **kwargs,
                "device": _CPU,
            }  # torch's own code names a device, as DTensor's does
        places = self.places
        if places is None:
            return self._run(func, types, args, kwargs)
        places.inside += 1
        try:
            out = self._run(func, types, args, kwargs)
            places.follow(func, args, kwargs, out)
        finally:
            places.inside -= 1
        return out

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        layouts = layers.are_of_cudnn()
        # Some operations return the default type, such as a division of integers.
        key: list[Any] = [func, torch.get_default_dtype(), layouts, *kwargs]
        described = (
            _repeats(func) and self._describe(args, key) and self._describe(kwargs.values(), key)
        )
        if not described:
            return self.by_torch(func, types, args, kwargs)
        again = known_repetition(at := tuple(key), func, args, kwargs)
        if again is not None:
            return again(self, func, types, args, kwargs)
        out = self.by_torch(func, types, args, kwargs)
        learn_repetition(at, self, func, args, kwargs, out)
        return out

    def _describe(self, values: Iterable[Any], into: list[Any]) -> bool:
        """Add to ``into`` all properties of ``values`` that can change an operation's result.

        Return False if the result may depend on anything else.
        """
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                # A constant also has values, on which a result can depend.
                if value.fake_mode is not self or value.constant is not None:
                    return False
                if value.layout is not torch.strided:
                    return False
                into += (value.dtype, value.shape, value.stride(), value.fake_device)
            elif kind in _PLAIN:
                # The type counts, too, because 1, 1.0 and True are equal.
                into += (kind, value)
            elif kind in (list, tuple):
                # Without the length, `[a], b` and `[a, b]` would have the same key.
                into += (kind, len(value))
                if not self._describe(value, into):
                    return False
            else:
                return False
        return True

    def by_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation as torch does on fake tensors, and correct the result's bytes and types."""
        # `lift_fresh` gets a tensor made of Python's numbers. torch converts it, and remembers the numbers.
        if self.convert and func is not _aten.lift_fresh.default and _has_bytes((args, kwargs)):
            args, kwargs = tree_map_only(Tensor, self.convert, (args, kwargs))
        if func in INSTEAD or _changes_values_only(func):
            with self:
                return INSTEAD.get(func, _return_nothing)(*args)
        if func.name() == "aten::_grouped_mm" and args[0].dtype is not torch.bfloat16:
            # In this product (mixtures of experts), torch accepts real tensors of several types, but fake
            # tensors only of type bfloat16.
            with self:
                halves = (matrix.bfloat16() for matrix in args[:2])
                return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
        # If an operation does not support fake tensors, torch runs it on real tensors of full size.
        self.allow_fallback_kernels = _bytes_in((args, kwargs)) <= MAX_REAL_BYTES
        try:
            out: Any = self.dispatch(func, types, args, kwargs)
        except UnsupportedOperatorException:
            if func not in _OF_SPARSE:
                raise
            with self:
                out = _OF_SPARSE[func](*args)
        if layers.are_of_cudnn() and func in _DIFFERENT_ON_CUDA:
            return self._as_on_cuda(func, args, out)
        if func in _LAYOUTS:
            return self._in_layout(_LAYOUTS[func](args), out)
        size = _LARGER_RESULTS.get(func)
        if size is not None:
            last = out[-1] if isinstance(out, tuple) else out
            last.untyped_storage().resize_(size(args, out))
        weight = args[_WEIGHTS[func]] if func in _WEIGHTS else None
        if weight is not None and weight.dtype is not args[0].dtype:
            kept = (
                self.empty(statistic.shape, statistic.stride(), weight.dtype)
                for statistic in out[1:]
            )
            return (out[0], *kept)
        return out

    def _as_on_cuda(self, func: Any, args: Any, out: Any) -> Any:
        if func in _CONVOLUTIONS:
            return self._in_layout_of_cudnn(out, *_CONVOLUTIONS[func](args))
        with self:
            return CORRECTIONS[func](args, out)

    def _in_layout_of_cudnn(self, out: Any, values: Tensor, weight: Tensor) -> Any:
        """Return a convolution's results, or those of its derivative, in cuDNN's layout."""
        if isinstance(out, tuple):
            laid = (
                None if gradient is None else self._in_layout_of_cudnn(gradient, values, weight)
                for gradient in out[:2]
            )
            return (*laid, out[2])
        return self._in_layout(layers.layout_of_results(values, weight), out)

    def _in_layout(self, layout: torch.memory_format, out: Any) -> Any:
        """Return results of which the first has another layout."""
        if isinstance(out, tuple):
            return (self._in_layout(layout, out[0]), *out[1:])
        if out is None:
            return None
        return self.empty(out.shape, layers.strides(out.shape, layout), out.dtype)

    def empty(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        meta = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
        return self.wrap(meta)

    def wrap(self, meta: Tensor) -> Tensor:
        """Return a fake tensor of this mode with the shape of ``meta``, a tensor on the device ``meta``.

        Does what ``FakeTensor()`` does, in a third of the time.
        """
        fake = make_subclass(FakeTensor, meta, dispatch_device=True, device_for_backend_keys=_CPU)
        allow_reading_the_address(fake)
        vars(fake).update(self._attributes)
        return fake


def _has_bytes(values: Any) -> bool:
    """Return whether an operation's arguments contain a real tensor. In most operations, there is none."""
    if isinstance(values, (tuple, list)):
        return any(map(_has_bytes, values))
    if isinstance(values, dict):
        return any(map(_has_bytes, values.values()))
    return isinstance(values, Tensor) and not isinstance(values, FakeTensor)


def _are_indices(values: Any) -> bool:
    """Return whether an operation's tensors are real integers of 32 bits, and there is one."""
    tensors = [tensor for tensor in tree_leaves(values) if isinstance(tensor, Tensor)]
    return bool(tensors) and all(
        tensor.dtype is torch.int32 and not isinstance(tensor, FakeTensor) for tensor in tensors
    )


def _bytes_in(values: Any) -> int:
    """Return the bytes that an operation's arguments need as real tensors. Sparse tensors count as 0."""
    return sum(
        bytes_of(tensor)
        for tensor in tree_leaves(values)
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided
    )


@functools.cache
def _changes_values_only(func: Any) -> bool:
    """Return True for a fused optimizer's step that only changes values and can't run on fake tensors.

    If torch ran the step, torch would create real tensors of the same size.
    """
    name = func.name()
    return (
        not func._schema.returns
        and name.startswith("aten::_fused_")
        and not has_kernel(name, "Meta")
    )


@functools.cache
def _repeats(func: Any) -> bool:
    """Return whether the shapes and types of an operation's arguments determine its results."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.startswith("aten::"):
        return False  # code of others may do anything
    composite = has_kernel(func.name(), "CompositeImplicitAutograd")
    return not (
        (composite and func.is_view)  # may return a view or not
        or torch.Tag.inplace_view in func.tags
        or schema.name.startswith(("aten::lift", "aten::resize", "aten::_resize", "aten::set_"))
        or schema.name == "aten::mkldnn_rnn_layer"  # keeps more if gradients are enabled
        or any(argument.is_out for argument in schema.arguments)
    )


Repetition = Callable[..., Any]
"""Function that makes the results of an operation again. It gets the `FakeMode` and the arguments of
``__torch_dispatch__``."""

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


def known_repetition(key: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> Repetition | None:
    """Return a function that makes an operation's results; ``None`` if they are not known_repetition yet.

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


def learn_repetition(
    key: tuple[Any, ...], mode: FakeMode, func: Any, args: Any, kwargs: Any, out: Any
) -> None:
    """Remember an operation's result ``out``. The other arguments are as in `known_repetition`."""
    given = _fakes((args, kwargs))
    again = _repetition(mode, given, args, out)
    if len(_known) < _MOST:
        _known[key] = again
        shapeless = _without_shapes(key, func, given)
        if shapeless and (like := _LikeArguments.of(again, given)) is not None:
            _known_for_all_shapes[shapeless] = like


def _fakes(values: Any) -> list[Tensor]:
    return [tensor for tensor in tree_leaves(values) if isinstance(tensor, FakeTensor)]


def _without_shapes(key: tuple[Any, ...], func: Any, given: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return a key without shapes; an empty key if torch must make the results for each shape."""
    if not given or not all(_is_row_by_row(tensor) for tensor in given):
        return ()
    shape, name = given[0].shape, func.name().partition(".")[0]
    if name in _NORMALISATIONS:
        shapes = {shape, shape[1:2]}
    elif torch.Tag.pointwise in func.tags or name in _LIKE_ARGUMENTS:
        shapes = {shape}
    else:
        return ()
    if not all(tensor.shape in shapes for tensor in given):
        return ()
    rest = (value for value in key if not isinstance(value, tuple))
    return (*rest, *(tensor.ndim for tensor in given))


def _is_row_by_row(tensor: Tensor) -> bool:
    """Return whether a tensor has exactly the strides that a new tensor of its shape has."""
    return tensor.stride() == torch.empty(tensor.shape, device=_META).stride()


@dataclass(frozen=True)
class _NewTensors:
    """`Repetition` that makes new tensors: one, or a list or tuple of them."""

    shapes: Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]
    sequence: Callable[[Any], Any] | None

    def __call__(self, mode: FakeMode, *_: Any) -> Any:
        made = (result and mode.empty(*result) for result in self.shapes)
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
        layouts = [(tensor.shape, tensor.stride()) for tensor in given]
        if not all(result is None or result[:2] in layouts for result in again.shapes):
            return None
        return cls(again, [result and layouts.index(result[:2]) for result in again.shapes])

    def repetition(self, given: Sequence[Tensor]) -> Repetition:
        if not isinstance(self.again, _NewTensors):
            return self.again
        shapes = [
            None
            if at is None or result is None
            else (given[at].shape, given[at].stride(), result[2])
            for at, result in zip(self.places, self.again.shapes, strict=True)
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
    taken = {tensor.untyped_storage()._cdata for tensor in given}
    if not all(result is None or _is_new(mode, result, taken) for result in made):
        return _by_torch
    shapes = [
        result if result is None else (result.shape, result.stride(), result.dtype)
        for result in made
    ]
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
    # The shape does not tell the bytes of a larger storage (`_LARGER_RESULTS`).
    new = storage._cdata not in taken and storage.nbytes() == again.nbytes()
    taken.add(storage._cdata)
    return new


def _view(mode: FakeMode, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
    # Here the fakes act as the tensors on `meta` inside them. So torch makes the view without this mode.
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return mode.wrap(out)
    return type(out)(mode.wrap(part) for part in out)


def _nothing(*_: Any) -> None:
    """`Repetition` of an operation that only changes values and returns nothing."""


def _first_argument(_mode: FakeMode, _func: Any, _types: Any, args: Any, _kwargs: Any) -> Any:
    return args[0]


def _by_torch(mode: FakeMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return mode.by_torch(func, types, args, kwargs)
