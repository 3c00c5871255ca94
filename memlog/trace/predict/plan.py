"""Plan for a traced step: the cheapest combination of changes with which it would fit.

Each change turns the traced step into a changed one, on which the next change is predicted. The order is:
part of the batch, accumulated gradients, other optimizers, autocast, checkpointing. So a combination is no
sum: a checkpointed module keeps the input of a part of the batch, and its second forward casts parameters
again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from memlog._internal.terminal import format_bytes
from memlog.trace.predict import optimizers
from memlog.trace.predict.checkpointing import (
    best_plan,
    peak_with_checkpointing,
    running_statistics,
)
from memlog.trace.predict.fitting import (
    MOMENTUM,
    NO_STATE,
    Choices,
    FittingPlan,
    PlannedChanges,
    PlanSearch,
    plan_code,
    plan_steps,
)
from memlog.trace.predict.hints import (
    forward_time,
    listed,
    why_no_prediction,
)
from memlog.trace.predict.lifetimes import TracedStep
from memlog.trace.predict.scaling import accumulating, scaled, why_not, with_autocast
from memlog.trace.records import RecordedTrace

_MARGIN: Final = 0.02
"""Share of a predicted peak that is added to it, as in an estimate."""
_ROUGH: Final = 0.08
"""The same under autocast, whose predictions are less exact."""
_BFLOAT16_CONVOLUTIONS: Final = (
    "on the CPU, oneDNN computes convolutions in bfloat16 with other buffers than in float32"
)
_MOST_PARTS: Final = 64
"""Largest number of parts if the size of the batch is unknown."""
_IN_8_BITS: Final = {
    name: f"bitsandbytes.optim.{name}8bit()" for name in ("Adam", "AdamW", "SGD", "RMSprop", "Lion")
}

_KINDS: Final[dict[str, optimizers.LighterOptimizer]] = {MOMENTUM: "momentum", NO_STATE: "no state"}
"""Kinds of the other optimizers in a plan; all else have 8 bits a number."""


class BesidesTensors(NamedTuple):
    """Memory that a run needed beside the tensors of its traced step."""

    size: int
    """Bytes; they are expected to stay when the step changes."""
    what: str
    """The memory in a few words, for "Needed is the peak with …"; empty: none is known."""
    without: str
    """Memory that is unknown, in a few words; empty: none."""


class PredictedNeed(NamedTuple):
    """Memory of a changed step, in bytes."""

    peak: int
    needed: int

    def fits(self, memory: int) -> bool:
        return self.needed <= memory


class StepPredictor:
    """Peaks of a traced step with combinations of changes."""

    def __init__(self, trace: RecordedTrace) -> None:
        self.step = TracedStep(trace)
        self.peak = self.step.peak
        best = best_plan(self.step, self.peak)
        self.modules = () if best is None else best.modules
        self._kept = optimizers.kept_states(self.step)
        self._before_autocast = functools.lru_cache(2)(self._smaller)

    def peak_with(self, changes: PlannedChanges) -> int | None:
        """Compute the peak with all changes together, in bytes; ``None``: it can't be predicted."""
        step: TracedStep | None = self._before_autocast(changes.parts, changes.optimizer)
        if changes.autocast and step is not None:
            step = with_autocast(step)
        if step is None:
            return None
        return (
            peak_with_checkpointing(step, changes.checkpointed)
            if changes.checkpointed
            else step.peak
        )

    def _smaller(self, parts: int, optimizer: str) -> TracedStep:
        step = self.step
        if parts > 1:
            step = accumulating(scaled(step, parts, whole_inputs=True))
        if not optimizer:
            return step
        lighter = _KINDS.get(optimizer, "8 bits")
        return optimizers.with_states(step, optimizers.lighter_states(self._kept, lighter))

    def lighter(self) -> Iterator[str]:
        """Yield the optimizers that could replace those of the step, as in `PlannedChanges.optimizer`."""
        names = {state.name for state in self._kept}
        if len(names) == 1 and self.step.trace.result.device.startswith("cuda"):
            yield from (_IN_8_BITS[name] for name in names if name in _IN_8_BITS)
        if any(state.values >= optimizers.TWO_MOMENTS for state in self._kept):
            yield MOMENTUM
        if self._kept:
            yield NO_STATE


class _TimedChoices(Choices[PlannedChanges]):
    """Changes to a traced step, in which the modules' forward passes were timed."""

    def __init__(self, predictor: StepPredictor, batch: int | None) -> None:
        casts = (False,) if _convolves_on_cpu(predictor.step) else (False, True)
        others = {"autocast": casts, "optimizer": ("", *predictor.lighter())}
        parts = _parts(predictor.step, batch)
        super().__init__(PlannedChanges(), parts, predictor.modules, others)
        self._result = predictor.step.trace.result

    def second_forward(self, checkpointed: Sequence[str]) -> float:
        return forward_time(self._result, checkpointed) or super().second_forward(checkpointed)


def plan_for_trace(
    trace: RecordedTrace,
    memory: int,
    besides: BesidesTensors,
    batch: int | None = None,
    as_it_is: str = "the traced step",
) -> FittingPlan | str:
    """Return the cheapest changes with which a traced step would fit into ``memory`` bytes.

    Return a sentence that says why there is no plan if the step can't be predicted.

    Args:
        trace: The traced step.
        memory: Bytes of memory.
        besides: Memory that the run needed beside tensors.
        batch: Size of the batch, which parts divide; ``None``: unknown.
        as_it_is: Name of the step in the plan.
    """
    reason = why_no_prediction(trace)
    if reason is not None:
        return reason
    predictor = StepPredictor(trace)
    if not predictor.step.has_backward or not trace.optimizers:
        return "The traced step has no backward pass or no optimizer's step, so there is no plan."

    @functools.cache
    def ask(changes: PlannedChanges) -> PredictedNeed | None:
        peak = predictor.peak if changes == PlannedChanges() else predictor.peak_with(changes)
        if peak is None:
            return None
        margin = _ROUGH * peak if changes.autocast else _MARGIN * peak
        # The traced step's own peak is known, so it needs no margin.
        if changes == PlannedChanges():
            margin = 0.0
        return PredictedNeed(peak, round(peak + margin) + besides.size)

    chosen, fits = PlanSearch(ask, _TimedChoices(predictor, batch), memory).cheapest()
    device = trace.result.device.partition(":")[0]
    return FittingPlan(
        **structs.asdict(chosen),
        memory=memory,
        fits=fits,
        steps=tuple(plan_steps(ask, chosen, memory, batch, as_it_is)),
        operations=None if chosen.checkpointed else 0.0,
        without=besides.without,
        code=plan_code(chosen, device, whole_batch=True) if fits else "",
        time=forward_time(trace.result, chosen.checkpointed) if chosen.checkpointed else None,
        remarks=tuple(_remarks(predictor, chosen, besides, batch)),
    )


def _parts(step: TracedStep, batch: int | None) -> list[int]:
    """Return the numbers of equal parts into which a batch can be divided.

    On the CPU, torch computes convolutions of one sample in another way, which needs other buffers.
    """
    if batch is None:
        return [2**power for power in range(_MOST_PARTS.bit_length())]
    most = max(batch // 2, 1) if _convolves_on_cpu(step) else batch
    return [parts for parts in range(1, most + 1) if batch % parts == 0]


def _convolves_on_cpu(step: TracedStep) -> bool:
    kinds = {step.kind(call.layer) for call in step.calls}
    return step.trace.result.device == "cpu" and any(kind.startswith("Conv") for kind in kinds)


def _remarks(
    predictor: StepPredictor, chosen: PlannedChanges, besides: BesidesTensors, batch: int | None
) -> Iterator[str]:
    if besides.what:
        yield (
            f"Needed is the peak and {format_bytes(besides.size)} for {besides.what}. A predicted peak has a "
            f"margin of {_MARGIN:.0%}, with autocast {_ROUGH:.0%}."
        )
    if chosen.parts > 1:
        if batch is None:
            yield f"This assumes that the batch can be divided into {chosen.parts} equal parts."
        yield "The whole batch stays in memory: its parts are views of it."
    twice = running_statistics(predictor.step, chosen.checkpointed)
    if twice:
        yield (
            f"{listed(twice)} would update its running statistics twice for each batch: use a momentum of "
            "1 - sqrt(1 - momentum)."
        )
    reason = why_not(predictor.step)
    if reason is None and _convolves_on_cpu(predictor.step):
        reason = _BFLOAT16_CONVOLUTIONS
    if reason is not None:
        yield f"Autocast is no part of the plan, because what it would save can't be predicted: {reason}."
