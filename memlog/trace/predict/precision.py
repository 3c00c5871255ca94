"""bfloat16 autocast: what it would save.

Under autocast matrix products and convolutions are computed, and leave their results, in two bytes a number
in place of four; what follows takes over the type of its input. The parameters stay as they are, and each
that such an operation uses is copied for as long as the backward pass needs it. What the loss makes stays in
four bytes.

Which storages these are the trace tells, where it was recorded operation by operation
(`memlog.tracer.engines.cpu.autocast_types`). Parameters were taken there for those of a product or a norm,
so a prediction is made where all parameters and buffers belong to layers of torch's whose operations are
known.
"""

from __future__ import annotations

from collections.abc import Iterator

from memlog.trace.encoding import BACKWARD, BUFFER, FORWARD, INPUT, OUTSIDE, PARAMETER
from memlog.trace.predict.lifetimes import (
    START,
    Course,
    Span,
    StepInterval,
    StorageLifetime,
    highest,
    steady_begin,
)
from memlog.trace.storage_uses import HALF, HALF_NOW, UNKNOWN, WIDE

_HALF = 0.5
_NAMED = 6
"""Kinds of layers that a sentence names."""
PRODUCTS = frozenset(
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
        ``None`` where `why_not` says why, or nothing would be cast.
    """
    if (
        why_not(course) is not None
        or is_on(course)
        or not any(life.uses.cast_first for life in course.lives)
    ):
        return None
    module_stack = [span for life in course.lives for span in _cast(course, life)]
    return highest([*module_stack, *_copied_results(course)], course.length)


def why_not(course: Course) -> str | None:
    """Why nothing is predicted, as the end of a sentence; ``None`` where something is."""
    unknown = unknown_to_autocast(course)
    if unknown and course.trace.kinds:
        named = ", ".join(unknown[:_NAMED])
        return f"{named} may use parameters or buffers in float32, which makes what follows float32 again"
    if all(life.uses.type == UNKNOWN for life in course.lives):
        return "this trace does not tell its storages' types (those of a GPU, and of an older memlog, don't)"
    return None


def is_on(course: Course) -> bool:
    """Whether some of what the forward pass makes is in two bytes a number already."""
    return any(life.uses.type == HALF_NOW and life.phase == FORWARD for life in course.lives)


def unknown_to_autocast(course: Course) -> list[str]:
    """Kinds of layers whose parameters or buffers may be used in ways that the trace does not tell."""
    holding = {life.layer for life in course.lives if life.category in (PARAMETER, BUFFER)}
    kinds = {course.kind(layer) or "what is in no module" for layer in holding}
    return sorted(kinds - PRODUCTS - _OTHERS)


def _cast(course: Course, life: StorageLifetime) -> Iterator[Span]:
    """A storage as it would be, and its copies for products."""
    begin, end, uses = steady_begin(life), life.end, life.uses
    if uses.type == HALF and _varies(life) and not _of_the_loss(course, life):
        yield Span(begin, end, life.size * _HALF)
        return
    if not uses.cast_first or uses.type != WIDE:
        yield Span(begin, end, life.size)
        return
    first, last = course.made_after(uses.cast_first), course.made_after(uses.cast_last) + 1
    in_backward = course.backward_after(first) < last
    until, copies = last, max(uses.casts, 1)
    if life.category == PARAMETER:
        # One copy serves the whole forward pass, and the backward pass as far as it needs it.
        until, copies = max(last, min(course.backward_after(first), course.length)), 1
    stretches = list(_between_steps(course, first, until))
    for stretch in stretches:
        yield Span(*stretch, life.size * _HALF * -(-copies // len(stretches)))
    let_go = life.passing or (_varies(life) and _goes_in_first_backward(course, life, first))
    if let_go and in_backward and uses.used < uses.cast_last:
        end = min(end, max(first, course.made_after(uses.used)) + 1)
    yield Span(begin, end, life.size)


def _goes_in_first_backward(course: Course, life: StorageLifetime, at: int) -> bool:
    """Whether autograd alone keeps a model's input: what the program holds is there after that, too."""
    following = course.turns[course.turns_before(course.backward_after(at)) :]
    left = next((turn.at for turn in following if turn.phase != BACKWARD), course.length)
    return course.backward_after(at) < life.end <= left


def _between_steps(course: Course, first: int, last: int) -> Iterator[StepInterval]:
    """What is kept for backward passes is gone as an optimizer steps, and made anew after that."""
    for step in course.steps[course.step_of(first) :]:
        if step.begin >= last:
            break
        if first < step.begin:
            yield StepInterval(first, step.begin)
        first = max(first, step.end)
    if first < last:
        yield StepInterval(first, last)


def _of_the_loss(course: Course, life: StorageLifetime) -> bool:
    return "Loss" in course.kind(life.layer)


def _copied_results(course: Course) -> Iterator[Span]:
    """The models' results, which a loss takes in four bytes, until the backward pass leaves the loss."""
    passed_on = {life for call in course.outermost() for life in call.inputs or ()}
    for call in course.outermost():
        left = [life for life in course.made_during(call) if life.end > call.end and _varies(life)]
        if left and left[-1].uses.type == HALF and left[-1] not in passed_on:
            yield _widened(course, left[-1], call.end)


def _varies(life: StorageLifetime) -> bool:
    """Whether it is of a pass; what one model makes may be another's input."""
    return life.passing or (life.category == INPUT and life.begin > START)


def _widened(course: Course, result: StorageLifetime, at: int) -> Span:
    """What a copy in four bytes adds; a product does not keep its own result in two beside it."""
    used = course.made_after(result.uses.used)
    if result.uses.used and used < course.backward_after(at):
        return Span(
            at, max(at, used) + 1, result.size
        )  # the loss needs it no longer (cross entropy)
    alone = course.kind(result.layer) in PRODUCTS
    return Span(at, _backward_into(course, at), result.size * (_HALF if alone else 1.0))


def _backward_into(course: Course, at: int) -> int:
    """When the backward pass after a moment comes to the first layer."""
    following = course.turns[course.turns_before(at) :]
    inside = (turn.at for turn in following if turn.phase == BACKWARD and turn.layer != OUTSIDE)
    return next(inside, course.length)
