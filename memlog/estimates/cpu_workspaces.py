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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from memlog._internal.terminal import MIB
from memlog.estimates import ctc_of_lists, lstm_on_cpu
from memlog.estimates.real_tensors import MAX_REAL_BYTES, bytes_of, real_tensor
from memlog.tracer.engines.cpu import op_workspace
from memlog.tracer.engines.cpu.op_workspace import Workspace
from memlog.tracer.tensor_storages import is_sparse
from memlog.tracer.torch_private import operation_name

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
    with op_workspace.of_fakes(_workspace):
        yield


def _workspace(func: Any, args: Any, kwargs: Any, out: Any) -> Workspace | None:
    """Return the workspace of an operation on fake tensors; ``None`` if it can't be measured."""
    kwargs = kwargs or {}
    name = operation_name(func).rstrip("_")
    if name in lstm_on_cpu.OPERATIONS:
        return lstm_on_cpu.workspace(func, args)
    of_lists = ctc_of_lists.workspace(func, args, out)
    if of_lists is not None:
        return of_lists
    if torch.Tag.inplace_view in func.tags:
        return Workspace(0, 0)
    # A measurement would change the state of the program's own generator. And it uses dense tensors of zeros,
    # but a sparse tensor stores only some values.
    if any(isinstance(each, torch.Generator) or is_sparse(each) for each in kwargs.values()) or any(
        is_sparse(each) for each in args
    ):
        return None
    call = _Call(func, args, kwargs, out)
    large = call.size(()) > _WHOLE
    with _disable_current_modes(), torch.no_grad(), _same_random_numbers(func):
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
        self.all = [each for _, each in (*self.given, *_tensors([("", out)]))]

    def size(self, cuts: _Cuts) -> int:
        """Return the bytes of arguments and results with some dimensions cut."""
        return sum(bytes_of(each, _shape(each, cuts)) for each in self.all)

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
            lambda each: real_tensor(each, _shape(each, cuts)),
            (list(args.values()), self.kwargs),
        )
        try:
            return op_workspace.allocations(self.func, *given)[1]
        except Exception:  # noqa: BLE001 - the operation does not work with zeros, or with these lengths
            return None


def _tensors(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    return [
        (name, each)
        for name, value in named
        for each in tree_leaves(value)
        if isinstance(each, Tensor) and each.layout is torch.strided
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
    if first.length <= 2 * first.fewest:
        return _allocations(call, others, MAX_REAL_BYTES // 2, cuts)
    least = call.size((*cuts, (first, first.fewest)))
    many = first.fewest + (most - least) * (first.length - first.fewest) // max(1, size - least)
    many = max(2 * first.fewest, many - many % (2 * first.fewest))
    points = (many // 2, many)
    found = [
        sizes
        for few in points
        if (sizes := _allocations(call, others, MAX_REAL_BYTES // 2, (*cuts, (first, few))))
        is not None
    ]
    if len(found) < len(points):
        # The operation failed, because its tensors do not share this dimension.
        return _allocations(call, others, MAX_REAL_BYTES // 2, cuts)
    return op_workspace.extrapolated(found, points, first.length)


def _dimensions(call: _Call) -> list[_Dimension]:
    """Return the dimensions to cut: first the batch, then others for tensors that are still too large."""
    batch = _batch(call)
    found = [] if batch is None else [batch]
    if call.name in _CONVOLUTIONS:
        return [*found, *_of_convolution(call)]
    if call.name in _BATCHED_PRODUCTS:
        return [*found, *_of_matrices(call)]
    return [*found, *_longest(call, tuple((one, one.fewest) for one in found))]


def _batch(call: _Call) -> _Dimension | None:
    """Return the dimension of the samples; ``None`` if there is none.

    The samples are the first dimension of the first tensor that is not a parameter. In pointwise operations
    and batched products, the samples are the first dimension of the tensor with the most dimensions. The
    first tensor of these operations may have no samples, because torch broadcasts tensors.
    """
    if torch.Tag.pointwise in call.func.tags or call.name in _BATCHED_PRODUCTS:
        tensors = [each for _, each in call.given]
        longest = max((tensor.ndim, tensor.shape[:1]) for tensor in tensors)
        samples = [tensor for tensor in tensors if (tensor.ndim, tensor.shape[:1]) == longest]
    else:
        shape = next((each.shape for name, each in call.given if name not in _PARAMETERS), None)
        # A loss may have a weight for each value. This weight has samples, and has the first tensor's shape.
        # The weight of a layer usually has another shape than the layer's input.
        samples = [
            each for name, each in call.given if name not in _PARAMETERS or each.shape == shape
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
        {id(each): (0, 1) for each in (*samples, *results) if each.shape[:1] == (length,)},
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
    inputs = [each for each in inputs if each is not None]
    outputs = [call.out if forward else args["grad_output"]]
    short, long = (inputs, outputs) if transposed else (outputs, inputs)
    found = []
    for at, length in enumerate(short[0].shape[2:]):
        around = args["dilation"][at] * (weight.shape[at + 2] - 1)
        places: dict[int, tuple[int, int]] = {id(each): (at + 2, 1) for each in short}
        places |= {id(each): (at + 2, args["stride"][at]) for each in long}
        found.append(_Dimension(length, _FEW_ROWS + around, places))
    if args["groups"] == 1:
        weights = [weight] if forward or call.out[1] is None else [weight, call.out[1]]
        places = {id(each): (1, 1) for each in inputs}
        places |= {id(each): (0 if transposed else 1, 1) for each in weights}
        found.append(_Dimension(inputs[0].shape[1], _FEW_VALUES, places))
    return found


def _of_matrices(call: _Call) -> list[_Dimension]:
    """Return the dimensions to cut in a product of two batches of matrices.

    They are the product's rows, the product's columns, and the dimension over which the product sums.
    """
    first, second, product = call.all[-3:]
    added = call.all[:-3]
    outer, inner = _fewest_sides(first)
    rows, columns = (
        {
            id(each): (at + each.ndim, 1)
            for each in (*added, product)
            if each.ndim >= -at and each.shape[at] == product.shape[at]
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
    largest = max(call.all, key=lambda each: bytes_of(each, _shape(each, cuts)))
    batch = {id(each) for dimension, _ in cuts for each in call.all if id(each) in dimension.places}
    found = []
    for at, length in enumerate(largest.shape):
        if at == 0 and id(largest) in batch:
            continue
        places = {}
        for each in call.all:
            outer = 1 if id(each) in batch else 0
            if each.ndim == largest.ndim:
                if at >= outer and _same(at, each.shape[at], length):
                    places[id(each)] = at, Fraction(each.shape[at], length)
            elif length in each.shape[outer:]:
                places[id(each)] = each.shape.index(length, outer), Fraction(1)
        found.append(_Dimension(length, _FEW_VALUES, places, partial(_multiples, length)))
    return sorted(found, key=lambda one: -one.length)


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

    bias = [torch.zeros(1, dtype=each.dtype) for each in args[:-2]]
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
    copies = sum(each.numel() * each.itemsize for each in (first, second) if not _for_blas(each))
    return Workspace(blocks.peak - blocks.kept + copies, 0)


def _fewest_sides(matrix: Tensor) -> tuple[int, int]:
    return (_OUTER, _INNER) if matrix.itemsize == _HALF else (_FEW, _FEW)


def _for_blas(matrix: Tensor) -> bool:
    """Return whether BLAS can read a matrix as stored (``addmm_impl_cpu_`` in ATen's LinearAlgebra.cpp)."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
