"""Hints: changes that would lower a traced step's peak, each with its predicted peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import CUT
from memlog.trace.predict import optimizers
from memlog.trace.predict.checkpointing import best_plan, running_statistics
from memlog.trace.predict.lifetimes import TracedStep
from memlog.trace.predict.scaling import accumulating, scaled, why_not, with_autocast
from memlog.trace.records import RecordedTrace, TraceResult

HintKind: TypeAlias = Literal["batch", "accumulation", "checkpointing", "precision", "optimizer"]

WORTH = 0.01
"""If a change saves less than this fraction of the memory, memlog gives no hint. The memory is the larger of
two figures: the step's peak, and the bytes that the process (or the device's allocator) holds. A post-mortem
report also ignores amounts below this fraction."""
_NAMED = 6
"""Maximum number of modules or optimizers that a sentence names."""
_LAYERS = 8


class HeldByLayer(msgspec.Struct, frozen=True):
    """Bytes that a layer held at the traced peak."""

    path: str
    """Path of the layer; for bytes allocated outside all modules, the line of the program."""
    at_peak: int
    """Bytes that the layer itself held. Bytes of layers inside this layer do not count."""
    largest: str
    """Category with the most bytes."""


class Hint(msgspec.Struct, frozen=True):
    """A change, and its predicted effect."""

    kind: HintKind
    """Kind of change."""
    what: str
    """The change, in words, with code between backticks."""
    peak: int
    """Predicted peak of the step, in bytes."""
    saved: int
    """Bytes by which the change lowers the peak."""
    share: float
    """Saved bytes as a fraction of the peak without the change, 0 to 1."""
    modules: tuple[str, ...] = ()
    """Paths of the modules to checkpoint."""
    time: float | None = None
    """Time that the change adds, as a fraction of the step's time; ``None``: unknown. Known for
    checkpointing only: the measured time of the modules' forward, which would run a second time."""

    def sentence(self) -> str:
        return (
            f"{self.what}: a peak of about {format_bytes(self.peak)}, "
            f"{format_bytes(self.saved)} ({self.share:.0%}) less."
        )


class Advice(msgspec.Struct, frozen=True):
    """Memory use of a traced step, and changes that would lower it. Sizes are bytes."""

    device: str
    """The traced device."""
    engine: str
    """The engine that traced the step."""
    traced_peak: int | None
    """The traced step's peak; ``None``: unknown."""
    peak: int | None
    """Peak of a step in which the optimizer's state exists from the start; ``None`` if the trace is not
    complete. The savings in all hints are relative to this peak."""
    categories: dict[str, int]
    """Bytes live at the traced peak by category, largest first."""
    layers: tuple[HeldByLayer, ...]
    """Layers that held the most bytes at the traced peak, largest first."""
    hints: tuple[Hint, ...]
    """Changes that would lower the peak. The change that saves the most bytes comes first."""
    notes: tuple[str, ...]
    """Whole sentences about the limits of these figures."""
    is_lower_bound: bool = False
    """True if the traced step held more than these figures, because a part of it was not traced."""


def advise(trace: RecordedTrace, held: int | None = None) -> Advice:
    """Find changes that would lower a traced step's peak.

    All figures are computed from the trace's events. No model runs. ``held`` is the number of bytes that the
    process (or the device's allocator) held in the step; ``None``: unknown. A hint must save at least 1 % of
    ``held`` and at least 1 % of the step's peak.
    """
    result = trace.result
    peak, hints, notes = _predictions(trace, held)
    return Advice(
        device=result.device,
        engine=result.engine,
        traced_peak=result.peak,
        peak=peak,
        categories=dict(sorted(result.categories.items(), key=lambda item: -item[1])),
        layers=_layers(trace),
        hints=hints,
        notes=notes,
        is_lower_bound=result.exactness == "lower bound",
    )


def steady_peak_of(trace: RecordedTrace) -> int | None:
    """Return the steady peak of a traced step, in bytes; ``None`` if the trace is not complete.

    The steady peak is the peak of a step in which the optimizer's state exists from the start.
    """
    return None if why_no_prediction(trace) else TracedStep(trace).peak


def _predictions(
    trace: RecordedTrace, held: int | None
) -> tuple[int | None, tuple[Hint, ...], tuple[str, ...]]:
    """Return the steady peak, hints and notes. If the trace is not complete, return only a note."""
    incomplete = why_no_prediction(trace)
    if incomplete is not None:
        return None, (), (*(note for note in trace.result.unseen if note == CUT), incomplete)
    traced = TracedStep(trace)
    peak = traced.peak
    min_saved = WORTH * max(peak, held or 0)
    hints = _hints(traced, peak, min_saved)
    return peak, hints, tuple(_notes(traced, hints, peak, min_saved))


def why_no_prediction(trace: RecordedTrace) -> str | None:
    """Return the reason why a trace is not complete, as a note; ``None`` if the trace is complete."""
    result = trace.result
    if result.exactness != "exact":
        return "The trace does not hold every allocation, so nothing can be predicted from it."
    if result.truncated:
        return (
            f"The trace holds {result.kept_events:,} of {result.events:,} events, so nothing can be "
            "predicted from it."
        )
    return None


def _notes(traced: TracedStep, hints: Sequence[Hint], peak: int, min_saved: float) -> Iterator[str]:
    twice = [path for hint in hints for path in running_statistics(traced, hint.modules)]
    if twice:
        yield (
            f"A checkpointed module's forward runs twice, so {listed(twice)} would update its running "
            "statistics twice for each batch: use a momentum of 1 - sqrt(1 - momentum)."
        )
    if not traced.has_backward:
        yield "The traced step did not reach its backward pass, so these figures do not include that pass."
    if traced.trace.result.peak != peak:
        yield (
            "The traced step was the first, which begins without optimizer state. The figures are "
            "predictions for later steps, which begin with it."
        )
    why_no_cast = why_not(traced)
    if why_no_cast is not None:
        yield f"The memory that autocast would save can't be predicted: {why_no_cast}."
    if optimizers.state_bytes(traced) >= min_saved and not optimizers.kept_states(traced):
        yield (
            "The memory that another optimizer would save is not predicted: the state of this one is not a "
            "whole number of values for each parameter."
        )
    if hints:
        yield "Each figure is for one change alone: two changes together save less than their sum."


def _layers(trace: RecordedTrace) -> tuple[HeldByLayer, ...]:
    held: dict[str, Counter[str]] = {}
    for share in trace.result.shares:
        held.setdefault(share.holder, Counter())[share.category] += share.size
    ranked = sorted(held.items(), key=lambda item: (-item[1].total(), item[0]))
    return tuple(
        HeldByLayer(path, sizes.total(), sizes.most_common(1)[0][0])
        for path, sizes in ranked[:_LAYERS]
    )


def _hints(traced: TracedStep, current: int, min_saved: float) -> tuple[Hint, ...]:
    hints = [*_smaller_batch(traced, current), *_checkpointing(traced, current)]
    hints += [*_precision(traced, current), *_optimizers(traced, current)]
    useful = (hint for hint in hints if hint.saved >= max(min_saved, 1))
    return tuple(sorted(useful, key=lambda hint: hint.peak))


def _hint(
    kind: HintKind,
    what: str,
    current: int,
    peak: int,
    modules: tuple[str, ...] = (),
    time: float | None = None,
) -> Hint:
    saved = current - peak
    return Hint(kind, what, peak, saved, saved / current if current else 0.0, modules, time)


def _smaller_batch(traced: TracedStep, current: int) -> Iterator[Hint]:
    half = scaled(traced, 2)
    yield _hint("batch", "Half the batch", current, half.peak)
    if not traced.has_backward:
        return  # the gradients are unknown
    what = (
        "Half the batch, with gradient accumulation over two batches: the training stays the same"
    )
    yield _hint("accumulation", what, current, accumulating(half).peak)


def _checkpointing(traced: TracedStep, current: int) -> Iterator[Hint]:
    plan = best_plan(traced, current)
    if plan is not None:
        what = f"`torch.utils.checkpoint` on {listed(plan.modules)}"
        time = forward_time(traced.trace.result, plan.modules)
        yield _hint("checkpointing", what, current, plan.peak, plan.modules, time)


def listed(paths: Sequence[str]) -> str:
    named = ", ".join(f"`{path}`" for path in paths[:_NAMED])
    return named + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")


def forward_time(result: TraceResult, modules: Sequence[str]) -> float | None:
    """Return the time of the modules' forward passes, as a fraction of the step's time."""
    if not result.duration_ms:
        return None
    phases = (layer.phase("forward") for layer in result.layers if layer.path in modules)
    return sum(phase.time_ms for phase in phases if phase is not None) / result.duration_ms


def _precision(traced: TracedStep, current: int) -> Iterator[Hint]:
    cast = with_autocast(traced)
    if cast is not None:
        device = traced.trace.result.device.partition(":")[0]
        what = f'`torch.autocast("{device}", dtype=torch.bfloat16)`, if all is float32 now'
        yield _hint("precision", what, current, cast.peak)


def _optimizers(traced: TracedStep, current: int) -> Iterator[Hint]:
    """Yield hints to delete the optimizers that did not step, and to replace those that stepped."""
    idle = optimizers.idle_bytes(traced)
    if idle:
        what = (
            f"Deleting the optimizers that did not step, whose state takes {format_bytes(idle)}, if nothing "
            "uses them"
        )
        yield _hint("optimizer", what, current, optimizers.without_idle(traced).peak)
    kept = optimizers.kept_states(traced)

    def hint(what: str, lighter: optimizers.LighterOptimizer) -> Hint:
        sizes = optimizers.lighter_states(kept, lighter)
        return _hint("optimizer", what, current, optimizers.with_states(traced, sizes).peak)

    heavy = [state for state in kept if state.values >= optimizers.TWO_MOMENTS]
    if heavy:
        yield hint(f"SGD with momentum in place of {_named(heavy)}", "momentum")
    if kept:
        yield hint(f"SGD without momentum in place of {_named(kept)}", "no state")
        more = any(state.values > optimizers.TWO_MOMENTS for state in kept)
        what = "An optimizer" if len(kept) == 1 else f"{len(kept)} optimizers"
        what += " with fused kernels whose state has 8 bits a number"
        what += ", two numbers for each parameter" if more else ""
        yield hint(what, "8 bits")


def _named(kept: Sequence[optimizers.State]) -> str:
    """Return text that names optimizers and the number of values that each optimizer keeps.

    The numbers are not added up, because two optimizers can keep state for the same parameters.
    """
    keeps = [f"{state.values} numbers" if state.values > 1 else "one number" for state in kept]
    if len(kept) == 1:
        name = f"{kept[0].name}, which" if kept[0].name else "an optimizer that"
        return f"{name} keeps {keeps[0]} for each parameter"
    entries = [f"{state.name or 'one'} {many}" for state, many in zip(kept, keeps, strict=True)]
    if len(entries) > _NAMED:
        entries = [*entries[:_NAMED], f"{len(entries) - _NAMED} more"]
    listed = f"{', '.join(entries[:-1])} and {entries[-1]}"
    return f"{len(kept)} optimizers that keep, for each of their parameters, {listed}"
