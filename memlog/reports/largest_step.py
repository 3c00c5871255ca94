"""Describe the largest step and the failing step by the shapes of their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memlog._internal.units import format_bytes
from memlog.events import StepInputs, TensorInput, main_reading
from memlog.facts.levels import UNKNOWN, Peak, peak_kind
from memlog.reports.final_state import FinalState
from memlog.reports.schema import InputFacts, LargestStep

_SHOWN = 4
"""Maximum number of inputs in a sentence."""


def shapes(inputs: Sequence[TensorInput | InputFacts]) -> str:
    """Return the names of inputs, in backticks, with their shapes."""
    times = "\N{MULTIPLICATION SIGN}"
    some = [f"`{each.name}` {times.join(map(str, each.shape))}" for each in inputs[:_SHOWN]]
    if len(inputs) > _SHOWN:
        some.append(f"{len(inputs) - _SHOWN} more")
    return ", ".join(some)


def role(found: LargestStep, peaks: Mapping[str, Peak]) -> str:
    """Return which part of the run's peak a step made."""
    most = peaks.get(peak_kind(found.device), UNKNOWN)
    if most.bytes is None or most.step == found.step:
        return "made the peak"
    return f"came within {format_bytes(max(most.bytes - found.peak_bytes, 0))} of the peak"


def like_another(like_step: int) -> str:
    """Return a sentence which says that a step's inputs do not explain its peak.

    ``like_step`` is the number of an earlier step with inputs of the same shapes and a lower peak.
    """
    return (
        f"Step {like_step} had inputs of the same shapes and a lower peak, so something else made this peak: "
        "work between the steps, such as an evaluation, or memory that was kept."
    )


def of_the_end(state: FinalState) -> Iterator[str]:
    """Yield sentences on the inputs of the failing step and of the largest earlier step."""
    failure, largest = state.failure, state.largest
    if failure is not None and failure.inputs:
        of = "Inputs of the step that failed"
        if failure.state is not None and failure.phase is None:
            of = "Tensors among the program's variables at the failure"
        elif failure.activity in {"evaluation", "generation"}:
            of = "Inputs of the forward pass that failed"
        yield f"{of}: {shapes(failure.inputs)}."
    if state.longest is not None:
        yield state.longest
    if largest is None:
        return
    where = "The process's" if largest.device == "host" else f"{largest.device}'s"
    said = (
        f"{where} peak rose to {format_bytes(largest.peak)} in step {largest.step}, whose inputs were "
        f"{shapes(largest.inputs)}."
    )
    yield " ".join([said, *_compared(largest, state)])


def _compared(largest: StepInputs, state: FinalState) -> Iterator[str]:
    if largest.like_step is not None:
        yield like_another(largest.like_step)
    traced = state.traced
    found = None if traced is None else main_reading(traced, largest.device)
    if traced is None or found is None or found.peak is None:
        return
    if largest.step in state.traced_steps:
        yield "This step was traced."
    elif largest.peak > found.peak:
        more = format_bytes(largest.peak - found.peak)
        yield (
            f"That is at least {more} more than in step {traced.step}, the newest traced one. Step "
            f"{largest.step} was not traced."
        )
    else:
        yield f"Step {largest.step} was not traced."
