"""Read the events that explain a run's end, in one pass over the journal and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from memlog._internal.processes import RankPosition
from memlog._internal.terminal import format_bytes
from memlog.events import (
    OF_OTHERS,
    OTHER_PROCESSES,
    POSTMORTEM_KIND,
    Artifact,
    Batch,
    Device,
    End,
    Exit,
    Finding,
    Health,
    OutOfMemory,
    PinnedMemory,
    RankFailure,
    Sample,
    StepInputs,
    TensorInput,
    Trace,
    main_reading,
    readings,
)
from memlog.facts.levels import UNKNOWN, Peak, peak_kind
from memlog.facts.oom_cause import has_gone_on
from memlog.facts.run_verdict import RunVerdict
from memlog.journal import Entry, RunDirectory
from memlog.ranks.ends import Failure
from memlog.ranks.registration import registration_of
from memlog.reports.schema import InputFacts, LargestStep

_SHOWN = 4
"""Maximum number of inputs in a sentence."""


def shapes(inputs: Sequence[TensorInput | InputFacts]) -> str:
    """Return the names of inputs, in backticks, with their shapes."""
    times = "\N{MULTIPLICATION SIGN}"
    some = [f"`{tensor.name}` {times.join(map(str, tensor.shape))}" for tensor in inputs[:_SHOWN]]
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
    reading = None if traced is None else main_reading(traced, largest.device)
    if traced is None or reading is None or reading.peak is None:
        return
    if largest.step in state.traced_steps:
        yield "This step was traced."
    elif largest.peak > reading.peak:
        more = format_bytes(largest.peak - reading.peak)
        yield (
            f"That is at least {more} more than in step {traced.step}, the newest traced one. Step "
            f"{largest.step} was not traced."
        )
    else:
        yield f"Step {largest.step} was not traced."


_MEMORY_KINDS = ("flamegraph", "snapshot")
"""Kinds of artifacts that show what held the memory."""

_STEPS = 200
_SAMPLES = 60


class FinalState(msgspec.Struct):
    """A run's last steps, and other events that explain its end."""

    open_command: str
    """Command line that shows the run's flame graph."""
    end: End | None = None
    failure: OutOfMemory | None = None
    """The newest failed allocation; ``None`` if the program went on after it."""
    survived_at: set[int] = set()
    """Times of failed allocations after which training went on."""
    failed_at: set[int] = set()
    """Times of failed allocations after which nothing shows yet that training went on."""
    first: Batch | None = None
    steps: list[Batch] = []
    """The last steps, at most `_STEPS`, oldest first."""
    samples: list[Sample] = []
    """The last samples of the helper process, at most `_SAMPLES`, oldest first."""
    trace: Trace | None = None
    """Newest traced step. If an allocation failed, only a trace of the failed device counts."""
    traced_device: str | None = None
    """Device of the newest traced step if ``trace`` is ``None`` because no trace is of the failed device."""
    pinned: PinnedMemory | None = None
    """Newest reading of the pinned memory; ``None``: there was none, or it is unknown."""
    least: dict[str, tuple[int | None, int]] = {}
    """Lowest memory of other processes on each device, and lowest memory outside the allocator: the step, and
    the bytes, by the reading's name."""
    devices: dict[str, Device] = {}
    """Accelerators in use, by name."""
    files: list[str] = []
    """Names of the files that show what held the memory: a flame graph, an allocator's snapshot, or both."""
    findings: list[Finding] = []
    """Findings in this process during the run, oldest first."""
    largest: StepInputs | None = None
    """Inputs of the newest step that is known to have raised the peak."""
    untraced: str = ""
    """Reason why the first trace waits, with the remedy; empty if it does not wait."""
    traced: Batch | None = None
    """Memory at the end of the newest traced step; ``None``: unknown."""
    traced_steps: list[int] = []
    """Numbers of the newest traced steps, at most `_STEPS`."""
    exit: Exit | None = None
    """End of the training process, as the helper process saw it; ``None``: unknown."""
    position: RankPosition | None = None
    """Rank of this process and number of ranks that train together; ``None``: the run trained alone."""
    failed_with: Failure | None = None
    """Order in which the ranks ended, if the training ended badly; else ``None``. Only rank 0's helper
    process knows the order. In other processes, the value is ``None``."""
    verdict: RunVerdict | None = None
    """Verdict on the memory, without a word on the end; ``None``: unknown."""
    longest: str | None = None
    """Sentence on the memory of a batch with the longest sample; ``None``: unknown."""
    reported: bool = False
    """True if the journal already has a report on the run's end, or names another rank as the cause."""

    @property
    def grew(self) -> str | None:
        """Sentence on memory that grew or rose; ``None``: it did not, or that is unknown."""
        return None if self.verdict is None else self.verdict.growth

    @property
    def survived(self) -> int:
        """Number of failed allocations after which training went on."""
        return len(self.survived_at)

    @property
    def last_step(self) -> int | None:
        """Number of the last complete step; ``None``: there was none."""
        return self.steps[-1].step if self.steps else None

    @property
    def last_sample(self) -> Sample | None:
        """Last sample in which the helper process found the training process; ``None``: there was none."""
        return next((sample for sample in reversed(self.samples) if sample.tree_pss), None)


def final_state(run: RunDirectory) -> FinalState:
    state = FinalState(run.command("open"))
    registration = registration_of(run)
    state.position = None if registration is None else registration.position
    steps: deque[Batch] = deque(maxlen=_STEPS)
    samples: deque[Sample] = deque(maxlen=_SAMPLES)
    traces: dict[str | None, Trace] = {}
    for file in run.files():
        _take_all(state, file.read(), steps, samples, traces)
    state.steps, state.samples = list(steps), list(samples)
    _choose_trace(state, traces)
    return state


def _choose_trace(state: FinalState, traces: dict[str | None, Trace]) -> None:
    """Keep the newest trace of the failed device. An older memlog's traces do not tell their device."""
    failure, trace = state.failure, state.trace
    if trace is None or failure is None or failure.worker is not None:
        return
    if not is_of_device(trace, failure.device):
        state.trace = traces.get(failure.device, traces.get(None))
    if state.trace is None:
        state.traced_device = trace.device
    if state.trace is not trace:
        step = None if state.trace is None else state.trace.step
        state.traced = next((batch for batch in state.steps if batch.step == step), None)


def is_of_device(trace: Trace, device: str) -> bool:
    """Return True if a trace may show a device's memory. ``device`` is a name as in events."""
    return trace.device in (None, device)


def _take_all(
    state: FinalState,
    entries: Iterable[Entry],
    steps: deque[Batch],
    samples: deque[Sample],
    traces: dict[str | None, Trace],
) -> None:
    for entry in entries:
        event = entry.event
        failed = state.failure
        if isinstance(event, Batch) or (failed is not None and has_gone_on(failed, event)):
            state.survived_at |= state.failed_at
            state.failed_at.clear()
            state.failure = None
        if isinstance(event, Batch):
            steps.append(event)
            state.first = state.first or event
        elif isinstance(event, Sample):
            samples.append(event)
            _note_least(state, event)
        elif isinstance(event, Trace):
            state.trace = traces[event.device] = event
            if event.step is not None:
                state.traced_steps = [*state.traced_steps, event.step][-_STEPS:]
                # Newest first, because a program can count its steps anew.
                same = (step for step in reversed(steps) if step.step == event.step)
                state.traced = next(same, None)
        elif isinstance(event, Health):
            state.untraced = event.untraced or state.untraced
        else:
            _note(state, event)


def _note_least(state: FinalState, sample: Sample) -> None:
    for reading in readings(sample):
        if reading.level is not None and reading.name.endswith((OTHER_PROCESSES, OF_OTHERS)):
            known = state.least.get(reading.name)
            if known is None or reading.level < known[1]:
                state.least[reading.name] = sample.step, reading.level


def _note_failure(state: FinalState, failure: OutOfMemory) -> None:
    if failure.caught:
        state.survived_at.add(failure.time_us)
    else:
        # If the allocation failed in another thread than the training, steps came before the program's end.
        state.survived_at.discard(failure.time_us)
        state.failed_at.add(failure.time_us)
    state.failure = None if failure.caught else failure


def _note(state: FinalState, event: object) -> None:
    if isinstance(event, OutOfMemory):
        _note_failure(state, event)
    elif isinstance(event, PinnedMemory):
        state.pinned = event
    elif isinstance(event, Device):
        state.devices[event.name] = event
    elif isinstance(event, Finding):
        if event.rank is None:
            state.findings.append(event)
    elif isinstance(event, StepInputs):
        state.largest = event
    elif isinstance(event, (End, Exit, RankFailure)):
        _note_end(state, event)
    elif isinstance(event, Artifact):
        state.reported |= event.kind == POSTMORTEM_KIND
        if event.kind in _MEMORY_KINDS and event.name not in state.files:
            state.files.append(event.name)


def _note_end(state: FinalState, event: End | Exit | RankFailure) -> None:
    if isinstance(event, End):
        state.end = event
    elif isinstance(event, Exit):
        state.exit = event
    else:
        state.reported |= event.run is not None
