"""What would make a traced step smaller, with the peak that each change would leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from memlog._internal.units import format_bytes
from memlog.trace.predict import optimizers, scaling
from memlog.trace.predict.checkpointing import best_plan, running_statistics
from memlog.trace.predict.lifetimes import Course
from memlog.trace.predict.precision import why_not, with_autocast
from memlog.trace.records import Trace

HintKind: TypeAlias = Literal["batch", "accumulation", "checkpointing", "precision", "optimizer"]

WORTH = 0.01
"""What saves less of all that is held is no hint, here and in a post-mortem report."""
_NAMED = 6
"""Modules that a sentence names."""
_LAYERS = 8
_TWO_MOMENTS = 2
_8_BIT = 1 + 4 / 256
"""Bytes of a number: one, and four for each block of 256 (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2022, as in bitsandbytes)."""


class HeldByLayer(msgspec.Struct, frozen=True):
    """A layer at the traced peak, in bytes."""

    path: str
    """Of the layer; of what no module made the line of the program that did."""
    at_peak: int
    """Its own part, without the layers inside it."""
    largest: str
    """The category that most of it is."""


class Hint(msgspec.Struct, frozen=True):
    """A change, and what it would do."""

    kind: HintKind
    what: str
    """The change, in words, with code between backticks."""
    peak: int
    """Bytes that the step would need at most."""
    saved: int
    """Bytes less than without it."""
    share: float
    """The same as a part of the peak, 0 to 1."""
    modules: tuple[str, ...] = ()
    """Those to checkpoint."""

    def sentence(self) -> str:
        """One line for a person."""
        return (
            f"{self.what}: a peak of about {format_bytes(self.peak)}, "
            f"{format_bytes(self.saved)} ({self.share:.0%}) less."
        )


class Advice(msgspec.Struct, frozen=True):
    """What a traced step's memory went to, and what would help. Sizes are bytes."""

    device: str
    engine: str
    traced_peak: int | None
    peak: int | None
    """The same of a later step, where the optimizer's state is there from the start: what the hints are
    measured by. ``None`` where the trace is not complete."""
    categories: dict[str, int]
    """What was live at the traced peak, largest first."""
    layers: tuple[HeldByLayer, ...]
    """Those that held most then, largest first."""
    hints: tuple[Hint, ...]
    """What saves most first."""
    notes: tuple[str, ...]
    """What is to be known about these figures, in whole sentences."""


def advise(trace: Trace, held: int | None = None) -> Advice:
    """Works out what would make a traced step smaller.

    Every figure is a replay of the trace's own events: no model runs.

    Args:
        trace: Of the step.
        held: Bytes that the process (or the device's allocator) held then, of which a hint must save a
            hundredth; ``None``: nobody knows, so the step's peak counts.
    """
    result = trace.result
    incomplete = _incomplete(trace)
    course = None if incomplete else Course(trace)
    now = 0 if course is None else scaling.steady_peak(course)
    worth = WORTH * max(now, held or 0)
    hints = () if course is None else _hints(course, now, worth)
    return Advice(
        device=result.device,
        engine=result.engine,
        traced_peak=result.peak,
        peak=None if course is None else now,
        categories=dict(sorted(result.categories.items(), key=lambda item: -item[1])),
        layers=_layers(trace),
        hints=hints,
        notes=(incomplete,) if incomplete else tuple(_notes(course, hints, worth)),
    )


def steady_peak_of(trace: Trace) -> int | None:
    """A traced step's peak in bytes, were it not the first; ``None`` where the trace is not complete."""
    return None if _incomplete(trace) else scaling.steady_peak(Course(trace))


def _incomplete(trace: Trace) -> str | None:
    result = trace.result
    if result.exactness != "exact":
        return "The trace does not hold every allocation, so nothing can be predicted from it."
    if result.truncated:
        return (
            f"The trace holds {result.kept_events:,} of {result.events:,} events, so nothing can be "
            "predicted from it."
        )
    return None


def _notes(course: Course | None, hints: Sequence[Hint], worth: float) -> Iterator[str]:
    if course is None:
        return
    twice = [path for hint in hints for path in running_statistics(course, hint.modules)]
    if twice:
        named = ", ".join(f"`{path}`" for path in twice[:_NAMED])
        more = f" and {len(twice) - _NAMED} more" if len(twice) > _NAMED else ""
        yield (
            f"A checkpointed module's forward runs twice, so {named}{more} would update its running "
            "statistics twice for each batch: a momentum of 1 - sqrt(1 - momentum) makes up for that."
        )
    if not course.has_backward:
        yield "The traced step did not reach its backward pass: what that would need is not in these figures."
    if course.has_backward and not course.tells_inputs:
        yield (
            "What checkpointing would save is not predicted: the trace, of an older memlog, does not say "
            "what modules were called with."
        )
    peak = scaling.steady_peak(course)
    if course.trace.result.peak != peak:
        yield (
            "The traced step was the first: the figures are those of a later one, in which the optimizer's "
            "state is there from the start."
        )
    why_no_cast = why_not(course)
    if why_no_cast is not None:
        yield f"What autocast would save can't be predicted: {why_no_cast}."
    if optimizers.state_bytes(course) >= worth and not optimizers.kept_states(course):
        yield (
            "What another optimizer would save is not predicted: the state of this one is not so and so many "
            "numbers for each parameter."
        )
    if hints:
        yield "Each figure stands for one change alone: two of them save less than both added up."


def _layers(trace: Trace) -> tuple[HeldByLayer, ...]:
    held: dict[str, Counter[str]] = {}
    for share in trace.result.shares:
        held.setdefault(share.holder, Counter())[share.category] += share.size
    ranked = sorted(held.items(), key=lambda item: (-item[1].total(), item[0]))
    return tuple(
        HeldByLayer(path, sizes.total(), sizes.most_common(1)[0][0])
        for path, sizes in ranked[:_LAYERS]
    )


def _hints(course: Course, now: int, worth: float) -> tuple[Hint, ...]:
    found = [*_smaller_batch(course, now), *_checkpointing(course, now)]
    found += [*_precision(course, now), *_optimizers(course, now)]
    useful = (hint for hint in found if hint.saved >= max(worth, 1))
    return tuple(sorted(useful, key=lambda hint: hint.peak))


def _hint(kind: HintKind, what: str, now: int, peak: int, modules: tuple[str, ...] = ()) -> Hint:
    saved = now - peak
    return Hint(kind, what, peak, saved, saved / now if now else 0.0, modules)


def _smaller_batch(course: Course, now: int) -> Iterator[Hint]:
    yield _hint("batch", "Half the batch", now, scaling.with_batch(course, 0.5))
    if not course.has_backward:
        return  # which gradients there will be it does not say
    what = "Half the batch, with the gradients of two of them added up: the training stays the same"
    yield _hint("accumulation", what, now, scaling.accumulated(course, 0.5))


def _checkpointing(course: Course, now: int) -> Iterator[Hint]:
    plan = best_plan(course, now)
    if plan is not None:
        named = ", ".join(f"`{path}`" for path in plan.modules[:_NAMED])
        more = len(plan.modules) - _NAMED
        what = f"`torch.utils.checkpoint` on {named}" + (f" and {more} more" if more > 0 else "")
        yield _hint("checkpointing", what, now, plan.peak, plan.modules)


def _precision(course: Course, now: int) -> Iterator[Hint]:
    peak = with_autocast(course)
    if peak is not None:
        device = course.trace.result.device.partition(":")[0]
        what = f'`torch.autocast("{device}", dtype=torch.bfloat16)`, if all is float32 now'
        yield _hint("precision", what, now, peak)


def _optimizers(course: Course, now: int) -> Iterator[Hint]:
    """What the optimizers' state, all of them having become lighter, would leave."""
    idle = optimizers.idle_bytes(course)
    if idle:
        what = (
            f"Letting go of optimizers that did not step, whose state takes {format_bytes(idle)}, if nothing "
            "uses them any more"
        )
        yield _hint("optimizer", what, now, optimizers.without_idle(course))
    kept = optimizers.kept_states(course)
    heavy = [state for state in kept if state.numbers >= _TWO_MOMENTS]
    if heavy:
        momentum = optimizers.with_states(course, {one.step: one.parameters for one in heavy})
        yield _hint("optimizer", f"SGD with momentum in place of {_named(heavy)}", now, momentum)
    if kept:
        bare = optimizers.with_states(course, {one.step: 0 for one in kept})
        yield _hint("optimizer", f"SGD without momentum in place of {_named(kept)}", now, bare)
        numbers = {
            one.step: min(one.numbers, _TWO_MOMENTS) * one.parameters / one.number for one in kept
        }
        sizes = {step: many * _8_BIT for step, many in numbers.items()}
        more = any(one.numbers > _TWO_MOMENTS for one in kept)
        what = "An optimizer" if len(kept) == 1 else f"{len(kept)} optimizers"
        what += " with fused kernels whose state has 8 bits a number"
        what += ", two numbers for each parameter" if more else ""
        yield _hint("optimizer", what, now, optimizers.with_states(course, sizes))


def _named(kept: Sequence[optimizers.State]) -> str:
    """Optimizers, and how many numbers each keeps: there may be two over the same parameters."""
    keeps = [f"{one.numbers} numbers" if one.numbers > 1 else "one number" for one in kept]
    if len(kept) == 1:
        name = f"{kept[0].name}, which" if kept[0].name else "an optimizer that"
        return f"{name} keeps {keeps[0]} for each parameter"
    each = [f"{one.name or 'one'} {many}" for one, many in zip(kept, keeps, strict=True)]
    if len(each) > _NAMED:
        each = [*each[:_NAMED], f"{len(each) - _NAMED} more likewise"]
    listed = f"{', '.join(each[:-1])} and {each[-1]}"
    return f"{len(kept)} optimizers that keep, for each of their parameters, {listed}"
