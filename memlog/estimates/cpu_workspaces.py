"""Workspaces of operations on the CPU, for fake tensors. They are measured on small real tensors.

oneDNN's convolutions copy their arguments into layouts of their own. These copies are a sixth of a UNet's
peak. `fold` copies its whole input. A softmax over a transposed tensor copies the tensor. The mean of
bfloat16 values is computed in float32. An operation on fake tensors makes no such copies. The sizes of the
copies depend on shapes, layouts, types, and the processor. So the operation runs on real tensors:

* If arguments and results have at most 1 MiB together, the operation runs one time with their full shapes.
* Otherwise the operation runs two times, with smaller batches. Copies grow linearly with the batch. So the
  sizes for two batches give the size for any batch.
* If a few samples are still too large, or the largest tensor has no samples (such as an embedding's table),
  other dimensions are cut, too. An operation that can't be cut to 32 MiB is not measured.
* A product of matrices is cut in each dimension. oneDNN copies blocks, which have a maximum size. A matrix in
  a layout that BLAS can't read is also copied as a whole.

Both are measured on a few time steps and extrapolated. Each time step adds the same number of bytes, except
for rounding to pages. If the weights or the batch are large, the measurements use a smaller batch, smaller
inputs and smaller states, too. The bytes grow with the square of the states' size, as the weights do. So
memlog measures three sizes of states, and computes the bytes from a parabola.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from memlog._internal.terminal import MIB
from memlog.estimates import ctc_of_lists
from memlog.torchside.fakes import tree_leaves, tree_map_only, without_modes
from memlog.torchside.internals import operation_name
from memlog.tracer.engines import op_workspace
from memlog.tracer.engines.op_workspace import Workspace
from memlog.tracer.engines.simulated_step import SIMULATED
from memlog.tracer.tensor_storages import is_sparse

MAX_REAL_BYTES: Final = 32 * MIB
"""Maximum total bytes of the real tensors on which an estimate runs an operation."""


def real_tensor(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros with the layout and type of a tensor, and the lengths in ``shape``."""
    strides = _strides(tensor, shape)
    return torch.zeros(extent(shape, strides), dtype=tensor.dtype).as_strided(shape, strides)


def bytes_of(tensor: Tensor, shape: Sequence[int] | None = None) -> int:
    """Return the bytes of ``real_tensor(tensor, shape)``. By default, use the tensor's own shape."""
    shape = tensor.shape if shape is None else shape
    return extent(shape, _strides(tensor, shape)) * tensor.itemsize


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the length, in values, of the memory that a tensor spans. Gaps between its values count, too."""
    if 0 in shape:
        return 0
    return 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))


def _strides(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    """Return strides for the lengths in ``shape``. The dimensions keep the tensor's order in memory."""
    strides = tensor.stride()
    new_strides = []
    for stride in strides:
        # Dimensions with smaller strides lie inside this one in memory. An expanded dimension has stride 0
        # and takes no memory of its own.
        inner = [at for at, other in enumerate(strides) if 0 < other < stride]
        # A slice of no values, such as `x[:, :0]`, has the strides of `x`.
        before = prod(tensor.shape[at] for at in inner) or 1
        new_strides.append(stride * prod(shape[at] for at in inner) // before)
    return new_strides


_WHOLE: Final = MIB
"""Maximum bytes of an operation's arguments and results together. Above this maximum, memlog measures with
smaller tensors."""
_FEW: Final = 2
"""Smallest number of samples to which memlog cuts a batch, and smallest side to which it cuts a matrix. For
half-precision matrices, the smallest sides are `_OUTER` and `_INNER`."""
_FEW_ROWS: Final = 4
"""Smallest length to which memlog cuts an image's side if the convolution's kernel has size 1. For a larger
kernel, the smallest length is larger."""
_FEW_VALUES: Final = 16
"""Smallest length to which memlog cuts dimensions other than the batch, such as channels. A processor's
vector and a oneDNN block have this length."""
_FEW_POINTS: Final = 16
"""Minimum samples of a cut batch if a convolution's kernel has size 1. With fewer samples, a single thread
does not use oneDNN (``use_mkldnn`` in ATen's Convolution.cpp). If the full batch has fewer samples, the
minimum is `_FEW`."""

_CONVOLUTIONS = ("convolution", "convolution_backward")
_PRODUCTS = ("mm", "addmm")
_BATCHED_PRODUCTS = ("bmm", "baddbmm")
_HALF = 2  # bytes of a half-precision value
_OUTER, _INNER = 1024, 2048
"""Minimum sides of half-precision matrices after a cut. With these sides, oneDNN's blocks have their maximum
size. `_INNER` is for the product's inner dimension. For other types, the minimum is `_FEW`, because MKL
allocates nothing for a product of other types."""

_PARAMETERS = frozenset(
    ("weight", "bias", "gamma", "running_mean", "running_var", "save_mean", "save_invstd")
)
"""Names that torch's operations give to tensors without a batch dimension."""
_SIZES = frozenset(["N", "size", "sizes", "input_size", "input_sizes", "self_sizes"])
"""Names of all arguments of torch's operations that are the batch size or a list that begins with the batch
size. memlog cuts the batch size in these arguments, too. Otherwise the operation would read past the end of
a tensor."""


@contextmanager
def measured_on_small_batches() -> Iterator[None]:
    """Inside the block, measure the workspaces of traced operations whose tensors are fake."""
    with SIMULATED.knowing(measure_fakes=_workspace):
        yield


def _workspace(func: Any, args: Any, kwargs: Any, out: Any) -> Workspace | None:
    """Return the workspace of an operation on fake tensors; ``None`` if it can't be measured."""
    kwargs = kwargs or {}
    name = operation_name(func).rstrip("_")
    if name in LSTM_OPERATIONS:
        return lstm_workspace(func, args)
    of_lists = ctc_of_lists.workspace(func, args, out)
    if of_lists is not None:
        return of_lists
    if torch.Tag.inplace_view in func.tags:
        return Workspace(0, 0)
    # A measurement would change the state of the program's own generator. And it uses dense tensors of zeros,
    # but a sparse tensor stores only some values.
    if any(
        isinstance(value, torch.Generator) or is_sparse(value) for value in kwargs.values()
    ) or any(is_sparse(arg) for arg in args):
        return None
    call = _Call(func, args, kwargs, out)
    large = call.size(()) > _WHOLE
    with without_modes(), torch.no_grad(), _same_random_numbers(func):
        if name in _PRODUCTS and large:
            return _of_product(func, args, kwargs)
        sizes = _allocations(call, _dimensions(call) if large else (), _WHOLE)
    return None if sizes is None else op_workspace.workspace_of(sizes)


def _same_random_numbers(func: Any) -> AbstractContextManager[None]:
    """Return a context in which a measurement does not change the program's random numbers."""
    random = torch.Tag.nondeterministic_seeded in func.tags
    return torch.random.fork_rng(devices=()) if random else nullcontext()


class _Dimension(NamedTuple):
    """Dimension that several tensors of an operation share. If it is cut, it is cut in all of them."""

    length: int
    fewest: int
    """Minimum length with which the operation works in the same way as with the full length."""
    places: Mapping[int, tuple[int, int | Fraction]]
    """Index of the dimension in a tensor's shape, and a factor. The key is the tensor's `id`. If ``length``
    shrinks by 1, the tensor's length at the index shrinks by the factor."""
    numbers: Callable[[str, Any, int], Any] = lambda _name, value, _few: value
    """Function that adapts an argument to a new length. It gets the argument's name and value, and the new
    length."""


_Cuts: TypeAlias = tuple[tuple[_Dimension, int], ...]
"""Dimensions that are cut, each with its new length."""


class _Call:
    """Call of an operation on fake tensors, to be repeated with real tensors."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.func = func
        self.out = out
        self.name = operation_name(func)
        names = [argument.name for argument in func._schema.arguments]
        self.args = dict(zip(names, args, strict=False))
        self.kwargs = kwargs
        # Compiled code gives an operation its result (``out=``).
        named = (*self.args.items(), *kwargs.items())
        self.given = _tensors(pair for pair in named if pair[0] != "out")
        self.all = [tensor for _, tensor in (*self.given, *_tensors([("", out)]))]

    def size(self, cuts: _Cuts) -> int:
        """Return the bytes of arguments and results with some dimensions cut."""
        return sum(bytes_of(tensor, _shape(tensor, cuts)) for tensor in self.all)

    def measured(self, cuts: _Cuts) -> list[int] | None:
        """Run the operation on real tensors with some dimensions cut.

        Return the bytes of its allocations (positive) and frees (negative); ``None`` if they can't be
        measured.
        """
        args = dict(self.args)
        for dimension, few in cuts:
            args = {name: dimension.numbers(name, value, few) for name, value in args.items()}
        given = tree_map_only(
            Tensor,
            lambda tensor: real_tensor(tensor, _shape(tensor, cuts)),
            (list(args.values()), self.kwargs),
        )
        try:
            return op_workspace.allocations(self.func, *given)[1]
        except Exception:  # noqa: BLE001 - the operation does not work with zeros, or with these lengths
            return None


def _tensors(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    return [
        (name, tensor)
        for name, value in named
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided
    ]


def _shape(tensor: Tensor, cuts: _Cuts) -> list[int]:
    shape = list(tensor.shape)
    for dimension, few in cuts:
        if id(tensor) in dimension.places:
            at, step = dimension.places[id(tensor)]
            shape[at] -= int((dimension.length - few) * step)
    return shape


def _allocations(
    call: _Call, dimensions: Sequence[_Dimension], most: int, cuts: _Cuts = ()
) -> list[int] | None:
    """Return the bytes of a call's allocations (positive) and frees (negative).

    If the tensors exceed ``most`` bytes, measure with smaller ``dimensions``, and extrapolate the bytes to
    the full lengths. ``cuts`` has the dimensions that are cut already. Return ``None`` if the bytes can't be
    measured.
    """
    size = call.size(cuts)
    if size <= most or not dimensions:
        return call.measured(cuts) if size <= MAX_REAL_BYTES else None
    first, *others = dimensions
    # The dimension is too short for measurements at two lengths.
    if first.length <= 2 * first.fewest:
        return _allocations(call, others, MAX_REAL_BYTES // 2, cuts)
    least = call.size((*cuts, (first, first.fewest)))
    # The size grows linearly with the length. With length `many`, the tensors have about `most` bytes.
    many = first.fewest + (most - least) * (first.length - first.fewest) // max(1, size - least)
    many = max(2 * first.fewest, many - many % (2 * first.fewest))
    points = (many // 2, many)
    measured = [
        sizes
        for few in points
        if (sizes := _allocations(call, others, MAX_REAL_BYTES // 2, (*cuts, (first, few))))
        is not None
    ]
    if len(measured) < len(points):
        # The operation failed, because its tensors do not share this dimension.
        return _allocations(call, others, MAX_REAL_BYTES // 2, cuts)
    return op_workspace.extrapolated(measured, points, first.length)


def _dimensions(call: _Call) -> list[_Dimension]:
    """Return the dimensions to cut: first the batch, then others for tensors that are still too large."""
    batch = _batch(call)
    samples = [] if batch is None else [batch]
    if call.name in _CONVOLUTIONS:
        return [*samples, *_of_convolution(call)]
    if call.name in _BATCHED_PRODUCTS:
        return [*samples, *_of_matrices(call)]
    return [
        *samples,
        *_longest(call, tuple((dimension, dimension.fewest) for dimension in samples)),
    ]


def _batch(call: _Call) -> _Dimension | None:
    """Return the dimension of the samples; ``None`` if there is none.

    The samples are the first dimension of the first tensor that is not a parameter. In pointwise operations
    and batched products, the samples are the first dimension of the tensor with the most dimensions. The
    first tensor of these operations may have no samples, because torch broadcasts tensors.
    """
    if torch.Tag.pointwise in call.func.tags or call.name in _BATCHED_PRODUCTS:
        tensors = [tensor for _, tensor in call.given]
        longest = max((tensor.ndim, tensor.shape[:1]) for tensor in tensors)
        samples = [tensor for tensor in tensors if (tensor.ndim, tensor.shape[:1]) == longest]
    else:
        shape = next((tensor.shape for name, tensor in call.given if name not in _PARAMETERS), None)
        # A loss may have a weight for each value. This weight has samples, and has the first tensor's shape.
        # The weight of a layer usually has another shape than the layer's input.
        samples = [
            tensor
            for name, tensor in call.given
            if name not in _PARAMETERS or tensor.shape == shape
        ]
    if not samples or not samples[0].ndim:
        return None
    length = samples[0].shape[0]

    def number(name: str, value: Any, few: int) -> Any:
        if name not in _SIZES:
            return value
        if isinstance(value, (list, tuple)):
            return [few, *value[1:]] if value[0] == length else value
        return few if value == length else value

    results = call.all[len(call.given) :]
    return _Dimension(
        length,
        _FEW_POINTS if _of_points(call) and length >= _FEW_POINTS else _FEW,
        {id(tensor): (0, 1) for tensor in (*samples, *results) if tensor.shape[:1] == (length,)},
        number,
    )


def _of_points(call: _Call) -> bool:
    return call.name in _CONVOLUTIONS and call.args["weight"].shape[2:].numel() == 1


def _of_convolution(call: _Call) -> list[_Dimension]:
    """Return the image's sides, and the input's channels if there are no groups."""
    args = call.args
    weight, transposed = args["weight"], bool(args["transposed"])
    forward = call.name == "convolution"
    inputs = [args["input"]] if forward else [args["input"], call.out[0]]
    inputs = [tensor for tensor in inputs if tensor is not None]
    outputs = [call.out if forward else args["grad_output"]]
    short, long = (inputs, outputs) if transposed else (outputs, inputs)
    dimensions = []
    for at, length in enumerate(short[0].shape[2:]):
        around = args["dilation"][at] * (weight.shape[at + 2] - 1)
        places: dict[int, tuple[int, int]] = {id(tensor): (at + 2, 1) for tensor in short}
        # One pixel of the shorter side corresponds to `stride` pixels of the longer side.
        places |= {id(tensor): (at + 2, args["stride"][at]) for tensor in long}
        dimensions.append(_Dimension(length, _FEW_ROWS + around, places))
    if args["groups"] == 1:
        weights = [weight] if forward or call.out[1] is None else [weight, call.out[1]]
        places = {id(tensor): (1, 1) for tensor in inputs}
        # A transposed convolution's weight has the input's channels in its first dimension.
        places |= {id(tensor): (0 if transposed else 1, 1) for tensor in weights}
        dimensions.append(_Dimension(inputs[0].shape[1], _FEW_VALUES, places))
    return dimensions


def _of_matrices(call: _Call) -> list[_Dimension]:
    """Return the dimensions to cut in a product of two batches of matrices.

    They are the product's rows, the product's columns, and the dimension over which the product sums.
    """
    first, second, product = call.all[-3:]
    added = call.all[:-3]
    outer, inner = _fewest_sides(first)
    rows, columns = (
        {
            id(tensor): (at + tensor.ndim, 1)
            for tensor in (*added, product)
            # `baddbmm` broadcasts the added tensor. Its lengths of 1 are not cut.
            if tensor.ndim >= -at and tensor.shape[at] == product.shape[at]
        }
        for at in (-2, -1)
    )
    return [
        _Dimension(product.shape[1], outer, {id(first): (1, 1), **rows}),
        _Dimension(product.shape[2], outer, {id(second): (2, 1), **columns}),
        _Dimension(first.shape[2], inner, {id(first): (2, 1), id(second): (1, 1)}),
    ]


def _longest(call: _Call, cuts: _Cuts) -> list[_Dimension]:
    """Return the dimensions of the largest tensor, the longest dimension first.

    A cut of one dimension also cuts other tensors and arguments:

    * Tensors with the same number of dimensions are cut at the same index, if `_same` is true.
    * Tensors with another number of dimensions are cut in their first dimension of the same length.
    * Integer arguments are cut if they are multiples of the length.
    """
    largest = max(call.all, key=lambda tensor: bytes_of(tensor, _shape(tensor, cuts)))
    batch = {
        id(tensor) for dimension, _ in cuts for tensor in call.all if id(tensor) in dimension.places
    }
    dimensions = []
    for at, length in enumerate(largest.shape):
        if at == 0 and id(largest) in batch:
            continue
        places = {}
        for tensor in call.all:
            outer = 1 if id(tensor) in batch else 0
            if tensor.ndim == largest.ndim:
                if at >= outer and _same(at, tensor.shape[at], length):
                    places[id(tensor)] = at, Fraction(tensor.shape[at], length)
            elif length in tensor.shape[outer:]:
                places[id(tensor)] = tensor.shape.index(length, outer), Fraction(1)
        dimensions.append(_Dimension(length, _FEW_VALUES, places, partial(_multiples, length)))
    return sorted(dimensions, key=lambda dimension: -dimension.length)


def _same(at: int, one: int, other: int) -> bool:
    """Return whether two tensors have the same dimension at index ``at`` of their shapes.

    The lengths ``one`` and ``other`` must be equal. For sides of images, one length may also be a multiple of
    the other length, because pooling divides sides, and upsampling multiplies sides.
    """
    image = at > 1 and min(one, other) > 1 and max(one, other) % min(one, other) == 0
    return one == other or image


def _multiples(length: int, _name: str, value: Any, few: int) -> Any:
    def shorter(number: int) -> int:
        return number if number % length else number // length * few

    return tree_map_only(int, shorter, value)


def _of_product(func: Any, args: Any, kwargs: Any) -> Workspace | None:
    """Return the workspace of a product of two matrices, which are the last arguments."""
    first, second = args[-2:]
    outer, inner = _fewest_sides(first)

    def cut(matrix: Tensor, rows: int, columns: int) -> Tensor:
        """Return a smaller matrix. It is stored by rows or by columns, like ``matrix``."""
        rows, columns = min(matrix.shape[0], rows), min(matrix.shape[1], columns)
        if _for_blas(matrix) and matrix.stride(1) != 1:
            return torch.zeros(columns, rows, dtype=matrix.dtype).t()
        return torch.zeros(rows, columns, dtype=matrix.dtype)

    bias = [torch.zeros(1, dtype=tensor.dtype) for tensor in args[:-2]]
    if "out" in kwargs:  # compiled code gives the result's buffer
        kwargs = {
            **kwargs,
            "out": torch.zeros(
                min(first.shape[0], outer), min(second.shape[1], outer), dtype=kwargs["out"].dtype
            ),
        }
    sizes = op_workspace.allocations(
        func, (*bias, cut(first, outer, inner), cut(second, inner, outer)), kwargs
    )[1]
    if sizes is None:
        return None
    blocks = op_workspace.workspace_of(sizes)
    copies = sum(
        tensor.numel() * tensor.itemsize for tensor in (first, second) if not _for_blas(tensor)
    )
    return Workspace(blocks.peak - blocks.kept + copies, 0)


def _fewest_sides(matrix: Tensor) -> tuple[int, int]:
    return (_OUTER, _INNER) if matrix.itemsize == _HALF else (_FEW, _FEW)


def _for_blas(matrix: Tensor) -> bool:
    """Return whether BLAS can read a matrix as stored (``addmm_impl_cpu_`` in ATen's LinearAlgebra.cpp)."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


LSTM_OPERATIONS: Final = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_aten: Final = torch.ops.aten
_FORWARD: Final = _aten.mkldnn_rnn_layer.default
_STEPS: Final = (16, 32)
_LARGE: Final = 4 * MIB
"""Size limit, in bytes, for each weight matrix, and for the states of 32 time steps together.

- If none of them is larger, memlog cuts only the time steps.
- If a weight matrix or the states are larger, memlog also cuts the batch, the inputs and the states."""
_LARGE_STEPS, _LARGE_BATCH = (4, 8), (8, 16)
_SQUARE, _NARROW, _WIDE = (256, 512, 768), (256, 512), (1024, 1280)
"""Sizes to measure if a weight matrix or the states exceed `_LARGE`.

- If the inputs are smaller than the states: `_NARROW` for the inputs, `_TALL` for the states.
- If the inputs are larger than the states: `_WIDE` for the inputs, `_SQUARE` for the states.
- If both are equal: `_SQUARE` for both."""
_TALL: Final = (512, 768, 1024)
"""Sizes to measure for states that are larger than the inputs."""
_ROW, _BLOCK = 256, 16
"""Divisors of a row's length. oneDNN makes a row longer if its length is a multiple of `_ROW`, and copies a
row if its length is not a multiple of `_BLOCK`. So `_points` chooses lengths for which oneDNN does the same
as for the full length."""
_TENSORS: Final = 7  # first arguments: the input, four weights, and two states
_HIDDEN: Final = 10
"""Position of the states' size among the arguments of the forward operation."""
_OF_FORWARD: Final = (13, 20, 14, 15, 16, 17, 19, 21, 18)
"""Positions in the backward operation's arguments. The values at these positions, in this order, are the
arguments that the forward operation gets after its tensors."""
_GRADIENTS: Final = slice(10, 13)
_HIDDEN_BACKWARD: Final = 15
_NUMBERS: Final = range(13, 22)


class _Measured(NamedTuple):
    forward: list[int]
    """Bytes of the forward operation's allocations (positive) and frees (negative)."""
    backward: list[int]
    kept: list[int]
    """Bytes that the forward operation keeps for the backward operation, as a list with one number."""


def kept(args: Any, _out: Any) -> int:
    """Return the bytes of the forward operation's last result; 0 if they can't be measured."""
    with without_modes():
        measured = _extrapolated(args, None, ())
    return 0 if measured is None else measured.kept[0]


def lstm_workspace(func: Any, args: Any) -> Workspace | None:
    """Return the lstm_workspace of one of the `LSTM_OPERATIONS`; ``None`` if it can't be measured."""
    backward = args if func is not _FORWARD else None
    forward = args if backward is None else [*args[:_TENSORS], *(args[at] for at in _OF_FORWARD)]
    trains = torch.is_grad_enabled() or backward is not None
    with without_modes(), torch.set_grad_enabled(trains):
        measured = _extrapolated(forward, backward, ())
    if measured is None:
        return None
    return op_workspace.workspace_of(measured.backward if backward else measured.forward)


def _extrapolated(forward: Any, backward: Any, chosen: tuple[int, ...]) -> _Measured | None:
    """Return the operations' allocations, extrapolated from measurements; ``None`` if a measurement fails.

    ``forward`` and ``backward`` are the operations' arguments. If ``backward`` is ``None``, only the forward
    operation is measured. ``chosen`` holds new lengths of the first dimensions, numbered as in `_points`.
    """
    lengths = (*forward[0].shape, forward[_HIDDEN])
    at = len(chosen)
    if at == len(lengths):
        return _measured(forward, backward, *chosen)
    if at == len(lengths) - 1 and lengths[at] == lengths[at - 1]:
        # Inputs and states are equal in size. They stay equal in each measurement.
        return _extrapolated(forward, backward, (*chosen, chosen[-1]))
    points = _points(forward, at)
    if lengths[at] <= points[-1]:
        return _extrapolated(forward, backward, (*chosen, lengths[at]))
    measured = [_extrapolated(forward, backward, (*chosen, length)) for length in points]
    complete = [measurement for measurement in measured if measurement is not None]
    if len(complete) < len(points):
        return None
    return _Measured(
        *(
            op_workspace.extrapolated(sizes, points, lengths[at])
            for sizes in zip(*complete, strict=True)
        )
    )


def _points(forward: Any, at: int) -> tuple[int, ...]:
    """Return the lengths to measure for dimension ``at``.

    Dimensions are numbered: 0 for time steps, 1 for samples, 2 for inputs, 3 for states.
    """
    inputs, weights = forward[0], forward[1:3]
    length = (*inputs.shape, forward[_HIDDEN])[at]
    states = _STEPS[-1] * inputs.shape[1] * forward[_HIDDEN] * inputs.itemsize
    if max(states, *(weight.nbytes for weight in weights)) <= _LARGE:
        return (length,) if at else _STEPS
    if at < len(inputs.shape) - 1:
        return (_LARGE_STEPS, _LARGE_BATCH)[at]
    wide = inputs.shape[-1] - forward[_HIDDEN]
    if not wide:
        points: tuple[int, ...] = _SQUARE
    elif at == len(inputs.shape) - 1:
        points = _WIDE if wide > 0 else _NARROW
    else:
        points = _SQUARE if wide > 0 else _TALL
    return tuple(point + (length % _ROW and _BLOCK + length % _BLOCK) for point in points)


def _measured(
    forward: Any, backward: Any, steps: int, samples: int, inputs: int, hidden: int
) -> _Measured | None:
    """Run the forward operation on real tensors. Also run the backward operation if ``backward`` is given.

    If gradients are disabled, the forward operation keeps nothing.
    """
    gates, state = 4 * hidden, (samples, hidden)
    weights = (gates, inputs), (gates, hidden)
    has_biases = forward[3].ndim == 1  # without biases, torch passes the weights again
    biases = ((gates,), (gates,)) if has_biases else weights
    shapes = ((steps, samples, inputs), *weights, *biases, state, state)
    tensors = list(map(real_tensor, forward[:_TENSORS], shapes))
    numbers = [*forward[_TENSORS:_HIDDEN], hidden, *forward[_HIDDEN + 1 :]]
    results, sizes = op_workspace.allocations(_FORWARD, (*tensors, *numbers), {})
    if sizes is None:
        return None
    kept_bytes = 0 if results[-1] is None else results[-1].nbytes
    if backward is None:
        return _Measured(sizes, [], [kept_bytes])
    gradients = [
        gradient if gradient is None else real_tensor(gradient, shape)
        for gradient, shape in zip(
            backward[_GRADIENTS], ((steps, *state), state, state), strict=True
        )
    ]
    others = [hidden if at == _HIDDEN_BACKWARD else backward[at] for at in _NUMBERS]
    given = (*tensors, *results[:-1], *gradients, *others, results[-1])
    more = op_workspace.allocations(_aten.mkldnn_rnn_layer_backward.default, given, {})[1]
    return None if more is None else _Measured(sizes, more, [kept_bytes])
