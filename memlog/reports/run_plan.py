"""Plan for a run: the changes with which its worst traced step would fit, with the memory beside tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import Batch, Event, OutOfMemory, Sample, StepInputs, Trace, main_reading
from memlog.facts.longest_batch import LongestBatch
from memlog.journal import RunDirectory
from memlog.reports.worst_step import Standing
from memlog.trace.predict.fitting import FittingPlan
from memlog.trace.predict.plan import BesidesTensors, plan_for_trace
from memlog.trace.records import RecordedTrace

_CONTEXT = "the memory of CUDA's context and libraries"


class RunPlan(msgspec.Struct, frozen=True):
    """Plan for the worst traced step of a run."""

    plan: FittingPlan | None
    """``None``: there is no plan, and `why_none` tells why."""
    why_none: str | None
    unsure: tuple[str, ...]
    """Sentences about steps that were not traced and need more. The plan may not be enough for them."""

    @property
    def is_enough(self) -> bool:
        """True if the traced step fits with the plan, and no other step is known to need more."""
        return self.plan is not None and self.plan.fits and not self.unsure


def plan_for_run(
    run: RunDirectory,
    event: Trace,
    trace: RecordedTrace,
    memory: int,
    standing: Standing,
    longest: LongestBatch | None,
) -> RunPlan:
    """Return the cheapest changes with which a run's worst traced step would fit.

    Args:
        run: The run.
        event: The event that was published about the traced step.
        trace: The traced step.
        memory: Bytes of memory.
        standing: The traced step, compared with the run's other steps.
        longest: Memory that a batch with the longest sample will need; ``None``: unknown.
    """
    if event.step is None:
        why = (
            "There is no plan, because the traced step did not end: what the rest of it needs is unknown. "
            "Train with a smaller batch for some steps, and ask for a plan for that run; or estimate the "
            "step with memlog estimate."
        )
        return RunPlan(None, why, ())
    facts = _StepFacts(event.step, trace.result.device)
    facts.take(run.events())
    besides = facts.besides(standing, trace.result.peak or 0)
    found = plan_for_trace(trace, memory, besides, facts.batch, f"step {event.step}")
    if isinstance(found, str):
        return RunPlan(None, found, ())
    return RunPlan(found, None, tuple(facts.unsure(standing, longest)))


class _StepFacts:
    """Memory and inputs of a traced step, from the events of its run."""

    def __init__(self, step: int, device: str) -> None:
        self._step = step
        self._is_on_host = device == "cpu"
        self._device = "host" if self._is_on_host else device.replace(":", "")
        self._at: Batch | None = None
        self._own: list[int] = []
        """Bytes of this process on the device, outside PyTorch's allocator."""
        self._outside: list[int] = []
        """Bytes of all processes on the device, without those of this process's allocator."""
        self._sizes: dict[int, set[int]] = {}
        """First dimensions of the inputs that are known, by step."""
        self._failed: int | None = None
        """Last step before a failed allocation."""

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Batch):
                if self._at is None and event.step >= self._step:
                    self._at = event
            elif isinstance(event, StepInputs):
                self._sizes[event.step] = {each.shape[0] for each in event.inputs if each.shape}
            elif isinstance(event, Sample):
                self._take_sample(event)
            elif isinstance(event, OutOfMemory) and event.device == self._device:
                self._failed = -1 if event.step is None else event.step

    def _take_sample(self, event: Sample) -> None:
        for each in event.devices:
            if each.name == self._device and each.other is not None:
                self._outside.append(each.other)
                if each.other_processes is not None:
                    self._own.append(max(each.other - each.other_processes, 0))

    @property
    def batch(self) -> int | None:
        """Size of the first dimension of the step's inputs; ``None``: unknown, or they differ in it.

        If the inputs of this step are unknown, those of all other known steps have to agree.
        """
        known = self._sizes.get(self._step) or set().union(*self._sizes.values())
        return next(iter(known)) if len(known) == 1 else None

    def besides(self, standing: Standing, traced_peak: int) -> BesidesTensors:
        """Return the memory beside tensors. ``traced_peak`` is the traced step's peak, in bytes."""
        if self._is_on_host:
            if standing.held is None:
                return BesidesTensors(0, "", "the process's memory beside tensors")
            size = max(standing.held - traced_peak, 0)
            return BesidesTensors(size, "the rest of what the process held at that step", "")
        found = None if self._at is None else main_reading(self._at, self._device)
        reserved = None if found is None or found.device is None else found.device.reserved
        idle = max((reserved or 0) - traced_peak, 0)
        parts = [] if reserved is None else ["what the allocator held unused"]
        without = [] if reserved is not None else ["memory that the allocator holds unused"]
        outside = max(self._own) if self._own else min(self._outside, default=None)
        if outside is None:
            without.append(_CONTEXT)
        else:
            parts.append(_CONTEXT if self._own else "memory on the device outside the allocator")
        return BesidesTensors(idle + (outside or 0), " and ".join(parts), "; ".join(without))

    def unsure(self, standing: Standing, longest: LongestBatch | None) -> Iterator[str]:
        """Yield sentences about steps that were not traced and need more than the traced step."""
        alone = f"The plan is for step {self._step} alone"
        if standing.larger is not None:
            yield f"{alone}: at step {standing.larger.step} more was held."
        elif self._failed is not None and self._failed >= self._step:
            yield f"{alone}: after step {self._failed} an allocation failed, where nothing was traced."
        if longest is not None and longest.size > longest.seen:
            yield (
                f"{alone}: a batch with the longest sample needs "
                f"{format_bytes(longest.low_bytes)} or more, without the plan's changes."
            )
