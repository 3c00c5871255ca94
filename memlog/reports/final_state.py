"""Read the events that explain a run's end, in one pass over the journal and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from memlog._internal.distributed import RankPosition
from memlog.events import (
    Artifact,
    Batch,
    End,
    Exit,
    Finding,
    OutOfMemory,
    Sample,
    StepInputs,
    Trace,
)
from memlog.journal import Entry, RunDirectory
from memlog.ranks.ends import Failure
from memlog.ranks.registration import registration_of

REPORT = "postmortem"
"""Kind of the artifact that explains a run's end."""

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
    """The newest failed allocation; ``None`` if a step was completed after it."""
    survived: int = 0
    """Number of failed allocations after which training went on."""
    first: Batch | None = None
    steps: list[Batch] = []
    """The last steps, at most `_STEPS`, oldest first."""
    samples: list[Sample] = []
    """The last samples of the helper process, at most `_SAMPLES`, oldest first."""
    trace: Trace | None = None
    files: list[str] = []
    """Names of the files that show what held the memory: a flame graph, an allocator's snapshot, or both."""
    findings: list[Finding] = []
    """Findings during the run, oldest first."""
    largest: StepInputs | None = None
    """Inputs of the newest step that is known to have raised the peak."""
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
    reported: bool = False
    """True if the journal already has a report on the run's end."""

    @property
    def last_step(self) -> int | None:
        """Number of the last complete step; ``None``: there was none."""
        return self.steps[-1].step if self.steps else None

    @property
    def last_sample(self) -> Sample | None:
        """Last sample in which the helper process found the training process; ``None``: there was none."""
        return next((each for each in reversed(self.samples) if each.tree_pss), None)


def final_state(run: RunDirectory) -> FinalState:
    state = FinalState(run.command("open"))
    registration = registration_of(run)
    state.position = None if registration is None else registration.position
    steps: deque[Batch] = deque(maxlen=_STEPS)
    samples: deque[Sample] = deque(maxlen=_SAMPLES)
    for file in run.files():
        _take_all(state, file.read(), steps, samples)
    state.steps, state.samples = list(steps), list(samples)
    return state


def _take_all(
    state: FinalState, entries: Iterable[Entry], steps: deque[Batch], samples: deque[Sample]
) -> None:
    for entry in entries:
        event = entry.event
        if isinstance(event, Batch):
            steps.append(event)
            state.first = state.first or event
            if state.failure is not None:
                state.failure, state.survived = None, state.survived + 1
        elif isinstance(event, Sample):
            samples.append(event)
        elif isinstance(event, Trace):
            state.trace = event
            if event.step is not None:
                state.traced_steps = [*state.traced_steps, event.step][-_STEPS:]
                same = (step for step in reversed(steps) if step.step == event.step)
                state.traced = next(same, None)
        else:
            _note(state, event)


def _note(state: FinalState, event: object) -> None:
    if isinstance(event, OutOfMemory):
        state.failure = event
    elif isinstance(event, Finding):
        state.findings.append(event)
    elif isinstance(event, StepInputs):
        state.largest = event
    elif isinstance(event, End):
        state.end = event
    elif isinstance(event, Exit):
        state.exit = event
    elif isinstance(event, Artifact):
        state.reported |= event.kind == REPORT
        if event.kind in _MEMORY_KINDS and event.name not in state.files:
            state.files.append(event.name)
