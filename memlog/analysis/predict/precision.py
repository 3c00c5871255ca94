"""bfloat16 autocast: what it would save.

Under autocast matrix products and convolutions are computed, and leave their results, in two bytes a number
in place of four; what follows takes over the type of its input. The parameters stay as they are, and each
that such an operation uses is copied for as long as the backward pass needs it. What the loss makes, and sums
along a residual stream that begins with an embedding or with the input itself, stay in four bytes.

That is an account of types that the trace does not tell, so it is the least certain of the predictions. It
is made where all parameters and buffers belong to layers of torch's whose operations are known. What a module
of another kind does with its own may be a product, which is cast, or a sum, which widens all that follows.
"""

from __future__ import annotations

from collections.abc import Iterator

from memlog.analysis.predict.course import Course, Life, Span, highest
from memlog.analysis.trace.stream import (
    BACKWARD,
    BUFFER,
    FORWARD,
    INPUT,
    OUTSIDE,
    PARAMETER,
    RECOMPUTE,
)

_HALF = 0.5
_WIDE_ON_THE_CPU = "MultiheadAttention"
"""With dropout, torch's CPU code for it goes back to four bytes inside."""
_PRODUCTS = frozenset(
    (
        "Linear",
        "NonDynamicallyQuantizableLinear",  # inside MultiheadAttention
        "MultiheadAttention",
        *(f"Conv{dimensions}d" for dimensions in (1, 2, 3)),
        *(f"ConvTranspose{dimensions}d" for dimensions in (1, 2, 3)),
    )
)
"""Layers that multiply matrices or convolve."""
_OTHERS = frozenset(
    (
        "Embedding",
        "EmbeddingBag",
        "LayerNorm",
        "GroupNorm",
        "SyncBatchNorm",
        *(f"BatchNorm{dimensions}d" for dimensions in (1, 2, 3)),
        *(f"InstanceNorm{dimensions}d" for dimensions in (1, 2, 3)),
    )
)
"""Those whose parameters take no part in a product, and whose results are of the type of their input, or
wide. RMSNorm is none of them: on the CPU its result is wide, on a GPU that depends on torch's version. What
LSTM, GRU and RNN keep depends on the library that runs them."""


def with_autocast(course: Course) -> int | None:
    """The peak under bfloat16 autocast.

    Returns:
        ``None`` where the trace shows that autocast is on already, or no products, or parameters or buffers
        of layers of which it does not tell what they do with them.
    """
    products = _products(course)
    if not products or unknown_to_autocast(course) or _is_on(course, products):
        return None
    wide = _Wide(course)
    sizes = {
        life: life.size * _HALF
        for life in course.lives
        if life.passing
        and life.phase in (FORWARD, BACKWARD, RECOMPUTE)
        and life.layer != OUTSIDE
        and not wide.has(life)
    }
    copies = [*_copied_parameters(course, products), *_copied_inputs(course, products)]
    copies += _copied_results(course, wide)
    return highest([*course.spans(sizes), *copies], course.length)


def unknown_to_autocast(course: Course) -> list[str]:
    """Kinds of layers whose parameters or buffers may be used in ways that the trace does not tell."""
    holding = {life.layer for life in course.lives if life.category in (PARAMETER, BUFFER)}
    kinds = {course.kind(layer) or "what is in no module" for layer in holding}
    return sorted(kinds - _PRODUCTS - _OTHERS)


def _products(course: Course) -> dict[int, int]:
    """Layers that multiply matrices or convolve, and hold no other layers, and their parameters' bytes."""
    holders = _containers(course)
    return {
        layer: sum(sizes)
        for layer, sizes in course.parameters().items()
        if layer not in holders and course.kind(layer) in _PRODUCTS
    }


def _is_on(course: Course, products: dict[int, int]) -> bool:
    """Whether most of these layers make copies of half their parameters' size."""
    halves = {layer: max(sizes) // 2 for layer, sizes in course.parameters().items()}
    copying = {
        life.layer
        for life in course.lives
        if life.phase == FORWARD and life.layer in products and life.size == halves[life.layer]
    }
    return 2 * len(copying) > len(products)


def _containers(course: Course) -> set[int]:
    """Layers that hold other layers."""
    holders = {path.rpartition(".")[0] for path in course.trace.paths}
    return {1} | {layer for layer, path in enumerate(course.trace.paths) if path in holders}


class _Wide:
    """What stays in four bytes a number."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._holders = _containers(course)
        sizes = {
            life.size for life in course.lives if life.category == INPUT or self._embedded(life)
        }
        # A stream is there where the model itself makes more of what it begins with: the sums.
        self._stream = {
            life.size
            for life in course.lives
            if life.phase == FORWARD and life.layer in self._holders and life.size in sizes
        }

    def has(self, life: Life) -> bool:
        kind = self._course.kind(life.layer)
        if self._embedded(life) or "Loss" in kind:
            return True
        if kind == _WIDE_ON_THE_CPU and self._course.trace.result.device == "cpu":
            return True
        by_a_sum = life.layer in self._holders or life.phase == BACKWARD
        return by_a_sum and life.size in self._stream

    def _embedded(self, life: Life) -> bool:
        return life.phase == FORWARD and self._course.kind(life.layer).startswith("Embedding")


def _copied_parameters(course: Course, products: dict[int, int]) -> Iterator[Span]:
    """Each product's parameters, from its first call to the end of its backward pass."""
    done = _backward_ends(course)
    begun: set[int] = set()
    for call in course.calls:
        if call.phase == FORWARD and call.layer in products and call.layer not in begun:
            begun.add(call.layer)
            end = done.get(call.layer, course.length)
            yield Span(call.begin, end, products[call.layer] * _HALF)


def _copied_inputs(course: Course, products: dict[int, int]) -> Iterator[Span]:
    """The inputs, where a product is the first to be called."""
    leaves = [call for call in course.calls if call.layer not in _containers(course)]
    first = min(leaves, key=lambda call: call.begin, default=None)
    if first is None or first.layer not in products:
        return
    end = _backward_ends(course).get(first.layer, course.length)
    yield from (
        Span(first.begin, end, life.size * _HALF) for life in course.lives if life.category == INPUT
    )


def _copied_results(course: Course, wide: _Wide) -> Iterator[Span]:
    """The model's results, which a loss takes in four bytes, until the backward pass leaves the loss."""
    for call in course.calls:
        if call.layer == 1 and call.phase == FORWARD:
            left = [
                life
                for life in course.lives
                if call.begin < life.begin < call.end < life.end and life.passing
            ]
            if left and not wide.has(left[-1]):
                yield _widened(course, left[-1], call.end)


def _widened(course: Course, result: Life, at: int) -> Span:
    """What a copy in four bytes adds; a product does not keep its own result in two beside it."""
    alone = course.kind(result.layer) in _PRODUCTS
    return Span(at, _backward_into(course, at), result.size * (_HALF if alone else 1.0))


def _backward_into(course: Course, at: int) -> int:
    """When the backward pass after a moment comes to the first layer."""
    following = course.turns[course.turns_before(at) :]
    inside = (turn.at for turn in following if turn.phase == BACKWARD and turn.layer != OUTSIDE)
    return next(inside, course.length)


def _backward_ends(course: Course) -> dict[int, int]:
    """By layer, when its last stretch of the backward pass is over."""
    following = [*(turn.at for turn in course.turns[1:]), course.length]
    return {
        turn.layer: end
        for turn, end in zip(course.turns, following, strict=False)
        if turn.phase == BACKWARD
    }
