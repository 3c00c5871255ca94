"""Read the worst traced step with all its events, and compare it with the run's other steps."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from memlog._internal.safe_files import read_plain
from memlog._internal.terminal import format_bytes
from memlog.errors import TraceNotFoundError
from memlog.events import (
    Batch,
    Event,
    OutOfMemory,
    Reading,
    StepInputs,
    Trace,
    main_reading,
    main_readings,
)
from memlog.journal import RunDirectory
from memlog.journal.format import UNDECODABLE
from memlog.reports.final_state import FinalState, shapes
from memlog.reports.growth_causes import failing_peak
from memlog.trace import encoding
from memlog.trace.predict import Advice, advise
from memlog.trace.records import HALF_BY_SLOW_CONVOLUTION, RecordedTrace

MAX_TRACE_BYTES = 256 * 1024**2
_LARGEST = 2**62
"""Maximum bytes of a storage. A trace with a larger storage counts as damaged: no real storage is as big."""
_WITH_TYPE = (encoding.FREE, encoding.USES)
"""Kinds of events whose ``phase`` is the type of a storage (`memlog.trace.records`)."""
_TYPES = HALF_BY_SLOW_CONVOLUTION + 1


class WorstStep(NamedTuple):
    """Worst traced step, as the tracer saved it."""

    event: Trace
    """The event that was published about the step."""
    trace: RecordedTrace


def read_worst_step(run: RunDirectory) -> WorstStep:
    """Return the traced step that needed most memory.

    Raises:
        TraceNotFoundError: No step was traced, or the file with the worst traced step can't be read.
    """
    try:
        kept = read_plain(run.path, run.worst_step.name, MAX_TRACE_BYTES)
        event, trace = msgspec.msgpack.decode(kept, type=tuple[Trace, RecordedTrace])
    except FileNotFoundError:
        raise TraceNotFoundError(
            f"no step of run {run.id} was traced: train with memlog.init(model=model, layers=True), or with "
            "`memlog run --layers`; if you did, `memlog show` tells why none was traced"
        ) from None
    except (OSError, *UNDECODABLE) as error:
        raise _unreadable(run, str(error)) from error
    if not _is_sound(trace):
        raise _unreadable(run, "its events are damaged")
    return WorstStep(event, trace)


def _unreadable(run: RunDirectory, why: str) -> TraceNotFoundError:
    return TraceNotFoundError(
        f"the traced step of run {run.id} can't be read ({why}): trace it again"
    )


def _is_sound(trace: RecordedTrace) -> bool:
    """Return True if all numbers of the events are in range. The file is untrusted."""
    if len(trace.events) % encoding.EVENT_BYTES or not trace.paths:
        return False
    return all(
        event.kind <= encoding.LINE
        and event.layer < len(trace.paths)
        and event.phase < (_TYPES if event.kind in _WITH_TYPE else len(encoding.PHASES))
        and event.category < len(encoding.CATEGORIES)
        and (event.kind != encoding.ALLOC or 0 <= event.size <= _LARGEST)
        and (event.kind != encoding.LINE or 0 < event.size <= len(trace.lines))
        for event in encoding.decode(trace.events)
    )


_FURTHER = 0.5
"""Minimum excess of a far larger step over the traced step's peak. A fraction of the bytes in the traced
step's tensors."""
_GROWN = 0.1
"""A step counts as far larger only if its excess is also more than this share of the traced step's peak."""
_RECENT = 64
"""Number of newest steps whose events are kept. A step's `Trace` event comes later than the step's own event.
When memlog reads the `Trace` event, memlog needs both events."""


class LargerStep(msgspec.Struct, frozen=True):
    """A step at which far more memory was in use than at the traced one."""

    step: int
    """Number of the step."""
    held: int
    """Bytes in use at this step's peak; a lower bound."""
    traced: bool
    """True if the larger step was traced. In this case, its tensors took no more bytes than the worst traced
    step's tensors, so memory outside tensors made the step larger."""
    inputs: str | None = None
    """The larger step's inputs and their shapes, as text. If these inputs are unknown, the text has the
    inputs of an earlier step, with that step's number. ``None``: no inputs are known."""


class Standing(msgspec.Struct, frozen=True):
    """The worst traced step, compared with the run's other steps."""

    traced_steps: int
    """Number of traced steps."""
    held: int | None
    """Lower bound of the bytes in use on the device at the worst traced step's peak. If the device is the
    CPU, these are the bytes of the process. ``None``: unknown."""
    larger: LargerStep | None
    """Another step, at which far more was held. It may be the step that ran out of memory. ``None``: none is
    known."""


class _Level(NamedTuple):
    """Bounds on the peak of one step, in bytes."""

    step: int
    held: int
    """Lower bound of the peak."""
    most: int
    """Upper bound of the peak."""


class _Failure(NamedTuple):
    """A failed allocation, and the last complete step before it."""

    failure: OutOfMemory
    last: Batch | None

    @property
    def step(self) -> int:
        return 0 if self.last is None else self.last.step + 1


class RankingFold:
    """Memory in use at a run's steps, collected from the journal in bounded memory."""

    def __init__(self) -> None:
        self.traced: set[int | None] = set()
        """Numbers of the traced steps."""
        self._at: dict[int, Batch | _Failure] = {}
        """Event of each traced step, by step number. If the journal lacks this event, the value is the next
        recorded step or failed allocation."""
        self._awaited: set[int] = set()
        """Numbers of the traced steps whose own events are still missing."""
        self._newest: deque[Batch | _Failure] = deque(maxlen=_RECENT)
        self._largest: dict[str, _Level] = {}
        self._last: Batch | None = None
        self._inputs: dict[int, str] = {}

    def take(self, event: Event) -> None:
        """Add an event, in the journal's order."""
        if isinstance(event, Batch):
            self._last = event
            for reading in main_readings(event):
                self._take_level(reading.owner, _bounds(event.step, reading))
            self._note(event)
        elif isinstance(event, Trace):
            self.traced.add(event.step)
            if event.step is not None and event.step not in self._at:
                self._find(event.step)
        elif isinstance(event, StepInputs):
            self._inputs[event.step] = shapes(event.inputs)
        elif isinstance(event, OutOfMemory):
            if self._last is not None and event.inputs:
                self._inputs[self._last.step + 1] = shapes(event.inputs)
            level = _failing(event, self._last, event.device)
            if level is not None:
                self._take_level(event.device, level)
                self._note(_Failure(event, self._last))

    def _take_level(self, device: str, level: _Level | None) -> None:
        largest = self._largest.get(device)
        if level is not None and (largest is None or level.held > largest.held):
            self._largest[device] = level

    def _note(self, moment: Batch | _Failure) -> None:
        self._newest.append(moment)
        # A list, because the loop removes entries from the set.
        for step in [step for step in self._awaited if moment.step >= step]:
            self._awaited.remove(step)
            self._at[step] = moment

    def _find(self, step: int) -> None:
        later = next((moment for moment in self._newest if moment.step >= step), None)
        if later is None:
            self._awaited.add(step)
        else:
            self._at[step] = later

    def level(self, event: Trace, device: str) -> _Level | None:
        """Return bounds on the peak of a traced step; ``None``: unknown.

        If the journal lacks the traced step, return the bounds for the next recorded or failed step. If the
        traced step has no number because it did not end, return the bounds for the newest recorded or failed
        step. ``device`` is the name, in the journal, of the traced device.
        """
        moment = self._newest[-1] if self._newest else None
        if event.step is not None:
            # If the run was killed, the journal may lack the traced step's event.
            later = (moment for moment in self._newest if moment.step >= (event.step or 0))
            moment = self._at.get(event.step) or next(later, None)
        if isinstance(moment, _Failure):
            return _failing(moment.failure, moment.last, device)
        return None if moment is None else _level(moment, device)

    def larger(self, at: _Level, device: str, advice: Advice) -> LargerStep | None:
        """Return the largest step if it needed far more memory than the traced step; else ``None``.

        ``at`` holds bounds on the traced step's peak. ``advice`` holds the savings predicted for the traced
        step. ``device`` is the device's name in the journal.
        """
        largest = self._largest.get(device)
        if largest is None:
            return None
        needs, traced = advice.peak or 0, advice.traced_peak or 0
        # Bytes by which a later step is predicted to exceed the first one.
        derived = max(needs - traced, 0)
        if not _is_far(largest.held - derived, at, max(needs, traced)):
            return None
        step = largest.step
        return LargerStep(step, largest.held, step in self.traced, self._inputs_of(step))

    def _inputs_of(self, step: int) -> str | None:
        known = max((earlier for earlier in self._inputs if earlier <= step), default=None)
        if known is None or known == step:
            return self._inputs.get(step)
        return f"{self._inputs[known]} (of step {known}, the last before it that is known)"


def advise_on(run: RunDirectory, event: Trace, trace: RecordedTrace) -> tuple[Advice, Standing]:
    """Predict savings in a run's worst traced step, and compare the step with those in the run's journal.

    ``event`` is the event that was published about the traced step.
    """
    fold = RankingFold()
    for recorded in run.events():
        fold.take(recorded)
    return advise_with(fold, event, trace)


def advise_with(fold: RankingFold, event: Trace, trace: RecordedTrace) -> tuple[Advice, Standing]:
    """Do the same as `advise_on`, but read no journal: ``fold`` has already taken the events."""
    # The journal's name of the traced device.
    device = "host" if trace.result.device == "cpu" else trace.result.device.replace(":", "")
    at = fold.level(event, device)
    held = None if at is None else at.held
    advice = advise(trace, held)
    larger = None if at is None or event.step is None else fold.larger(at, device, advice)
    # If the run was killed, the journal may lack the worst step's event. But the worst step was traced, so
    # the number is at least 1.
    return advice, Standing(max(len(fold.traced), 1), held, larger)


def _failing(failure: OutOfMemory, last: Batch | None, device: str) -> _Level | None:
    """Return bounds on the peak of the step that ran out of memory on this device; ``None`` if unknown."""
    highest = failing_peak(failure, last)
    if highest is None or last is None or failure.device != device:
        return None
    return _Level(last.step + 1, highest, highest)


def held_more(state: FinalState, trace: Trace) -> int | None:
    """Return how many more bytes the failing step held than the traced step.

    ``None``: unknown, or not far more.
    """
    failure = state.failure
    last = state.steps[-1] if state.steps else None
    highest = failing_peak(failure, last)
    device = "host" if failure is None else failure.device
    later = (
        _level(step, device)
        for step in state.steps
        if trace.step is not None and step.step >= trace.step
    )
    at = next((level for level in later if level is not None), None)
    if highest is None or at is None or not _is_far(highest, at, trace.peak or 0):
        return None
    return highest - at.held


def _is_far(held: int, at: _Level, tensors: int) -> bool:
    """Return True if ``held``, the peak of a step in bytes, is far above the traced step's peak.

    ``at`` holds bounds on the traced step's peak. The traced step's tensors took ``tensors`` bytes.
    """
    return held - at.most > max(_FURTHER * tensors, _GROWN * at.most)


def not_the_largest(found: Standing, step: int | None, advice: Advice) -> str | None:
    """Return a remark if another step was larger than the traced step; ``None`` if no such step is known.

    ``step`` is the traced step's number.
    """
    larger = found.larger
    if larger is None:
        return None
    who = "the process" if advice.device == "cpu" else advice.device
    now, then = format_bytes(found.held), format_bytes(larger.held)
    said = (
        f"The trace is of step {step}, which needs {format_bytes(advice.traced_peak)} in tensors. The run's "
        f"largest step was {larger.step}: {who} held {then} there, and {now} at step {step}."
    )
    if larger.inputs:
        said += f" Its inputs: {larger.inputs}."
    if larger.traced:
        return f"{said} It was traced, too, and its tensors took no more: something else held the difference."
    return (
        f"{said} It was not traced, so these figures do not show why it was larger. "
        "`memlog.init(layers=True, budget=0.05)` traces more steps; `memlog.MemoryTracer` traces a step "
        "that you choose, such as one with the longest input."
    )


def _level(batch: Batch, device: str) -> _Level | None:
    """Return bounds on a step's peak. A peak counter that did not rise in the step is only an upper bound."""
    reading = main_reading(batch, device)
    return None if reading is None else _bounds(batch.step, reading)


def _bounds(step: int, found: Reading) -> _Level | None:
    if found.level is None:
        return None
    most = max(found.level, found.peak or 0)
    return _Level(step, found.level if found.source == "watermark" else most, most)
