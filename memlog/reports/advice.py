"""Advice on a run that had too little memory, and a plan with which its worst traced step would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import Batch, Event, OutOfMemory, Sample, StepInputs, Trace, main_reading
from memlog.facts.later_memory import LongestBatch
from memlog.facts.levels import among
from memlog.facts.oom_room import PINNED, Cause
from memlog.journal import RunDirectory
from memlog.reports.final_state import FinalState
from memlog.reports.growth_causes import FULL, GrowthCauses
from memlog.reports.oom_diagnosis import FULL_SHARED_MEMORY
from memlog.reports.worst_step import Standing, not_the_largest
from memlog.trace import encoding
from memlog.trace.predict import WORTH, Advice
from memlog.trace.predict.fitting import FittingPlan
from memlog.trace.predict.plan import BesidesTensors, plan_for_trace
from memlog.trace.records import RecordedTrace

_CONTEXT = "the memory of CUDA's context and libraries"


class RunPlan(msgspec.Struct, frozen=True):
    """Plan for the worst traced step of a run."""

    plan: FittingPlan | None
    """``None``: there is no plan, and `why_none` tells why."""
    why_none: str | None
    """Why there is no plan."""
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
    plan = plan_for_trace(trace, memory, besides, facts.batch, f"step {event.step}")
    if isinstance(plan, str):
        return RunPlan(None, plan, ())
    return RunPlan(plan, None, tuple(facts.unsure(standing, longest)))


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
                # The journal can lack the traced step's own event. Then the next one counts.
                if self._at is None and event.step >= self._step:
                    self._at = event
            elif isinstance(event, StepInputs):
                self._sizes[event.step] = {
                    tensor.shape[0] for tensor in event.inputs if tensor.shape
                }
            elif isinstance(event, Sample):
                self._take_sample(event)
            elif isinstance(event, OutOfMemory) and event.device == self._device:
                self._failed = -1 if event.step is None else event.step

    def _take_sample(self, event: Sample) -> None:
        for device in event.devices:
            if device.name == self._device and device.other is not None:
                self._outside.append(device.other)
                if device.other_processes is not None:
                    self._own.append(max(device.other - device.other_processes, 0))

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
        reading = None if self._at is None else main_reading(self._at, self._device)
        reserved = None if reading is None or reading.device is None else reading.device.reserved
        idle = max((reserved or 0) - traced_peak, 0)
        parts = [] if reserved is None else ["what the allocator held unused"]
        without = [] if reserved is not None else ["memory that the allocator holds unused"]
        # Other processes come and go. So of a sum that includes them, only the lowest value is sure
        # to be needed.
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


_LARGE = 0.3
"""If a category of memory is less than this share of the traced peak, the advice does not mention it."""
_SMALL = 0.1
"""If tensors hold less than this share of the process's memory, the advice points to other memory."""
_WORKERS = 0.5
"""If child processes hold more than this share of the process tree's memory, the advice mentions them."""
_PINNED = 0.05
"""If pinned memory is less than this share of the host's memory in use, the advice does not mention it."""
FAR_LARGER = 1.5
"""If the failing step needed more than this multiple of the traced peak, it counts as far larger than the
traced step."""
_NAMED = 6
"""Maximum number of modules that a line of advice names."""


class Prediction(NamedTuple):
    """Predicted savings in a run's worst traced step."""

    advice: Advice
    step: int | None
    """Number of the worst traced step; ``None``: the step did not end."""
    standing: Standing


def advice(
    state: FinalState,
    growth: GrowthCauses,
    predicted: Prediction | None,
    cause: Cause | None = None,
) -> list[str]:
    """Return lines of advice, the most promising first; never empty.

    ``cause`` is the cause of a failure on a device; ``None``: unknown.
    """
    failure = state.failure
    if failure is not None and failure.worker is not None:
        return list(_worker(failure))
    if failure is not None and failure.is_implausible:
        return [_of_the_request(failure)]
    # If earlier growth is the cause, no change to the model helps.
    is_elsewhere = growth.failed_by_chance or (failure is not None and growth.keeps)
    if cause is not None and not cause.is_of_the_step and cause.kind != "leak":
        return [*cause.remedies, *(_smaller_need(state) if cause.kind == "fraction" else ())]
    lines = [
        *growth.why_it_grew(),
        *growth.why_the_place_is_chance(),
        *(() if is_elsewhere else _of_the_model(state, predicted)),
        *(cause.remedies if cause is not None and cause.is_of_the_step else ()),
        *_workers(state),
        *_pinned(state),
        *_shared(state),
        *_limit(failure, only_later=growth.keeps),
    ]
    return lines or ["A smaller batch, or gradient accumulation in place of a larger one."]


def needed(failure: OutOfMemory) -> int:
    """Return a lower bound of the bytes that tensors needed at the failure, including the failed request."""
    # On the host, `allocated` is everything that the process holds.
    in_use = failure.allocated if failure.device != "host" else 0
    return (in_use or 0) + (failure.requested or 0)


def had_room(failure: OutOfMemory) -> bool:
    """Return True if the tightest known limit had room for the request.

    A limit counts as full if less than the share `FULL` of it is free. The reason: an allocator takes more
    memory from the system than the program requests.
    """
    free = failure.free or 0
    # A request of unknown size never counts as one that fits.
    return free >= (failure.requested or free + 1) and free >= FULL * (failure.limit or 0)


def needed_far_more(failure: OutOfMemory, trace: Trace) -> bool:
    """Return True if the failing step needed far more than the traced one."""
    return bool(trace.peak) and needed(failure) > FAR_LARGER * (trace.peak or 0)


def in_a_step(failure: OutOfMemory, trace: Trace | None) -> bool:
    """Return True if a training step made the failed request, or may have made it."""
    if failure.layer or failure.phase:
        return True
    if failure.device != "host":
        return False  # the phase of a failure on a device is known
    peak = 0 if trace is None else trace.peak or 0
    return (
        "DefaultCPUAllocator" in failure.message
        and failure.requested is not None
        and failure.requested <= FAR_LARGER * peak
    )


def _smaller_need(state: FinalState) -> Iterator[str]:
    if state.failure is not None and state.failure.phase in {"forward", "backward"}:
        yield "A smaller batch, or gradient accumulation in place of a larger one, needs less."


def _of_the_model(state: FinalState, predicted: Prediction | None) -> Iterator[str]:
    """Yield advice on making training steps smaller. If that would not help, yield other advice instead."""
    failure, trace = state.failure, state.trace
    if instead := _besides_activations(state, predicted):
        yield instead
        return
    if failure is not None and trace is not None and needed_far_more(failure, trace):
        yield from _of_a_larger_step(failure, trace, predicted)
    else:
        held = _held(state)
        yield from (
            _by_prediction(predicted) or list(_by_category(trace, held)) or _by_others(trace, held)
        )
    if trace is None and state.untraced:
        yield f"No step was traced, which would show what holds the memory: {state.untraced}."
    elif trace is None and state.traced_device is None:
        yield "Tracing shows what holds the memory: `memlog.init(model=model, layers=True)`."


def _besides_activations(state: FinalState, predicted: Prediction | None) -> str | None:
    """Return a line that replaces all other advice on training steps; ``None``: give the other advice."""
    failure, trace = state.failure, state.trace
    if failure is None:
        return _another_step(predicted) or _small_tensors(trace, state)
    if not state.steps and trace is None:
        return _before_any_step(failure)
    if not in_a_step(failure, trace):
        where = (
            "the error's traceback shows where" if failure.line is None else f"by {failure.line}"
        )
        return (
            f"The request was made outside the model's layers: {where}. Request less there, or process the "
            "data in pieces; a smaller batch may not help."
        )
    far_more = trace is not None and needed_far_more(failure, trace)
    if not far_more and (other := _another_step(predicted)):
        return other
    if failure.phase == "optimizer" and not _little_state(failure, trace, _held(state)):
        return (
            "It failed in the optimizer's step. A smaller batch does not help, because the optimizer's state "
            "has the same size for every batch. Use an optimizer with less state (Adam keeps two numbers for "
            "each parameter, SGD with momentum one, plain SGD none), an 8-bit optimizer (a quarter of the "
            "bytes), or sharding (FSDP, ZeRO)."
        )
    return None


def _before_any_step(failure: OutOfMemory) -> str:
    """Return advice on a failure while the program loaded data, built its model or made its first step."""
    if failure.phase is not None:
        return (
            "It failed in the first step, and no step was traced. A smaller batch, or shorter or smaller "
            "inputs, makes activations smaller; a smaller model, or bfloat16 weights, makes everything "
            "smaller."
        )
    held = "" if failure.resident is None else f" It held {format_bytes(failure.resident)}."
    return (
        "Memory ran out before the first step was complete, while the program loaded data, built its model "
        f"or ran that step.{held} The error's traceback shows where. Load less at once (`numpy.memmap` maps "
        "a file in place of reading it), or build a smaller model or batch."
    )


def _small_tensors(trace: Trace | None, state: FinalState) -> str | None:
    """Return a sentence which says that tensors were a small part of the memory; else ``None``."""
    sample = state.last_sample
    held = None if sample is None else sample.tree_pss
    if trace is None or held is None or (trace.peak or 0) >= _SMALL * held:
        return None
    return (
        f"The traced step's tensors took only {format_bytes(trace.peak)}: other memory of the process, "
        "such as data sets, caches and lists, matters more."
    )


def _held(state: FinalState) -> int:
    """Return the bytes in use at the end of the run; 0 if unknown.

    If an allocation failed, these are the bytes on its device. Otherwise, they are the bytes of the process.
    """
    failure = state.failure
    rss = state.steps[-1].rss if state.steps else None
    if failure is None or failure.device == "host":
        return max(rss or 0, 0 if failure is None else failure.allocated or 0)
    return failure.allocated or 0


def _little_state(failure: OutOfMemory, trace: Trace | None, held: int) -> bool:
    """Return True if the optimizer's state is a negligible part of the memory in use.

    The trace may lack the state. So the state counts as at least twice the parameters' bytes, as for Adam.
    """
    if trace is None or (failure.requested or 0) >= WORTH * held:
        return False
    state, parameters = (
        trace.at_peak.get(encoding.CATEGORIES[number], 0)
        for number in (encoding.OPTIMIZER_STATE, encoding.PARAMETER)
    )
    return max(state, 2 * parameters) < WORTH * held


def _by_others(trace: Trace | None, held: int) -> Iterator[str]:
    if trace is not None and trace.peak is not None and trace.peak < held:
        yield (
            "No change to the model that memlog can predict would save 1% or more of the "
            f"{format_bytes(held)} in use: the traced step's tensors took {format_bytes(trace.peak)}. Other "
            "memory of the process, such as data sets, caches and lists, may matter more."
        )


def _of_a_larger_step(
    failure: OutOfMemory, trace: Trace, predicted: Prediction | None
) -> Iterator[str]:
    """Yield advice on a failing step that was far larger than the traced one.

    The advice is on memory that depends on the input. Parameters and optimizer state do not depend on it.
    """
    where = {"forward": "forward pass", "backward": "backward pass"}.get(
        failure.phase or "", "forward or backward pass"
    )
    asked = "requested" if failure.device == "host" else "in use or requested"
    yield (
        f"The step that failed needed far more than the traced one ({format_bytes(needed(failure))} "
        f"{asked}, {format_bytes(trace.peak)} at the traced peak): its {where} grew with its input. A "
        "smaller batch, or shorter or smaller inputs, makes that smaller; a lighter optimizer does not, "
        "because its state does not grow with the input."
    )
    modules = _to_checkpoint(predicted)
    yield (
        f"`torch.utils.checkpoint`{f' (on {modules})' if modules else ''} computes activations again in "
        "backward in place of keeping them; bfloat16 autocast makes them smaller. The savings of both are "
        "unknown, because the traced step was so much smaller."
    )


def _to_checkpoint(predicted: Prediction | None) -> str:
    hints = () if predicted is None else predicted.advice.hints
    modules = next((hint.modules for hint in hints if hint.kind == "checkpointing"), ())
    return ", ".join(f"`{path}`" for path in modules[:_NAMED])


def _another_step(predicted: Prediction | None) -> str | None:
    """Return a sentence with the reason why memlog predicts no saving: another step was larger.

    Return ``None`` if no larger step is known.
    """
    if predicted is None:
        return None
    said = not_the_largest(predicted.standing, predicted.step, predicted.advice)
    if said is None:
        return None
    return f"No saving is predicted, because the traced step was not like the largest. {said}"


def _by_prediction(predicted: Prediction | None) -> list[str]:
    if predicted is None or not predicted.advice.hints:
        return []
    savings = predicted.advice
    step = "a step that did not end" if predicted.step is None else f"step {predicted.step}"
    return [
        *(hint.sentence() for hint in savings.hints),
        f"These peaks are predicted from {step}, {among(predicted.standing.traced_steps)}, which needs "
        f"{format_bytes(savings.peak)}. {' '.join(savings.notes)}",
    ]


def _by_category(trace: Trace | None, in_use: int) -> Iterator[str]:
    if trace is None or not trace.peak:
        return
    held = {number: trace.at_peak.get(name, 0) for number, name in enumerate(encoding.CATEGORIES)}
    large = max(_LARGE * trace.peak, WORTH * in_use)
    if held[encoding.ACTIVATION] >= large:
        size = format_bytes(held[encoding.ACTIVATION])
        top = ", ".join(f"`{layer.path}`" for layer in trace.layers[:3] if layer.path)
        where = f" (most of it in {top})" if top else ""
        yield (
            f"Activations hold {size}{where}: half the batch needs about half of that; "
            "`torch.utils.checkpoint` computes them again in backward; bfloat16 autocast makes them smaller."
        )
    if held[encoding.OPTIMIZER_STATE] >= large:
        yield (
            f"The optimizer's state holds {format_bytes(held[encoding.OPTIMIZER_STATE])}: SGD with "
            "momentum needs half of Adam's, 8-bit optimizers a quarter; sharding (FSDP, ZeRO) divides it."
        )
    if held[encoding.PARAMETER] + held[encoding.GRADIENT] >= 2 * large:
        yield "Parameters and gradients hold most: bfloat16 weights halve them, sharding (FSDP) divides them."


def _worker(failure: OutOfMemory) -> Iterator[str]:
    if failure.signal == FULL_SHARED_MEMORY:
        yield (
            "More shared memory: `docker run --shm-size=8g` (or `--ipc=host`), a larger `emptyDir` of medium "
            "`Memory` at `/dev/shm` in Kubernetes; or "
            '`torch.multiprocessing.set_sharing_strategy("file_system")`.'
        )
    yield (
        "`DataLoader(num_workers=0)` loads in the training process: a debugger, and this report, then show "
        "which code requests so much."
    )
    yield (
        "Each worker makes whole batches of its own: smaller samples, a smaller batch, fewer workers or a "
        "smaller `prefetch_factor` leave more for each."
    )
    yield (
        "Store the data set as one array or tensor, which all workers share. A list of many Python objects, "
        "such as paths, is copied to each worker little by little: reading an object changes its reference "
        "count, and a worker copies each memory page that it changes."
    )
    yield "A limit such as `ulimit -v` is for each worker alone; all workers share the machine's memory."


def _workers(state: FinalState) -> Iterator[str]:
    sample = state.last_sample
    rss = state.steps[-1].rss if state.steps else None
    if sample is None or not sample.tree_pss or rss is None or (sample.tree_processes or 1) < 2:  # noqa: PLR2004
        return
    others = sample.tree_pss - rss
    if others > _WORKERS * sample.tree_pss:
        yield (
            f"{(sample.tree_processes or 2) - 1} other processes of the tree hold about "
            f"{format_bytes(others)}: fewer DataLoader workers, or data that they share."
        )


def pinned_share(state: FinalState) -> float:
    """Return the pinned memory as a share of the most memory of the host that the run held; 0 if unknown."""
    highest = [step.rss_peak or step.rss or 0 for step in state.steps]
    highest += [sample.tree_pss or 0 for sample in state.samples]
    held = max(highest, default=0)
    return state.pinned.held / held if state.pinned is not None and held else 0.0


def _pinned(state: FinalState) -> Iterator[str]:
    on_host = state.failure is None or state.failure.device == "host" or _is_shared(state)
    if state.pinned is not None and on_host and pinned_share(state) >= _PINNED:
        yield f"{format_bytes(state.pinned.held)} are pinned memory. {PINNED}"


def _shared(state: FinalState) -> Iterator[str]:
    sample = state.last_sample
    if _is_shared(state) and sample is not None:
        yield (
            f"The device shares the host's memory, of which the process and its descendants held "
            f"{format_bytes(sample.tree_pss)}: fewer DataLoader workers and less data in the host's memory "
            "leave more for the device."
        )


def _is_shared(state: FinalState) -> bool:
    """Return True if the device on which an allocation failed shares the host's memory."""
    failure = state.failure
    return failure is not None and failure.state is not None and failure.state.shares_host


def _of_the_request(failure: OutOfMemory) -> str:
    size, there = format_bytes(failure.requested), format_bytes(failure.capacity)
    whole = (
        "the whole machine has" if failure.device == "host" else f"the whole {failure.device} has"
    )
    return (
        f"{size} were requested in one piece, and {whole} {there}: no limit and no smaller model makes room "
        "for that. Most likely a size or a shape is wrong, such as that of an unintended outer product or "
        "broadcast: the error's traceback shows where. If it is intended, compute it in pieces."
    )


def _limit(failure: OutOfMemory | None, *, only_later: bool) -> Iterator[str]:
    if failure is None or failure.limited_by is None or failure.device != "host":
        return
    if had_room(failure):
        return  # the known limit had room, so another limit stopped the allocation
    limit = f"{failure.limited_by}, now {format_bytes(failure.limit)}."
    if only_later:
        yield f"A higher limit only lets it fail later: {limit}"
    else:
        yield f"A higher limit, if that is possible: {limit}"
