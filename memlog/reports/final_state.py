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


class LastMoments(msgspec.Struct):
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
        """Last sample in which the helper process found the trainer's process; ``None``: there was none."""
        return next((each for each in reversed(self.samples) if each.tree_pss), None)


def last_moments(run: RunDirectory) -> LastMoments:
    moments = LastMoments(run.command("open"))
    registration = registration_of(run)
    moments.position = None if registration is None else registration.position
    steps: deque[Batch] = deque(maxlen=_STEPS)
    samples: deque[Sample] = deque(maxlen=_SAMPLES)
    for file in run.files():
        _take_all(moments, file.read(), steps, samples)
    moments.steps, moments.samples = list(steps), list(samples)
    return moments


def _take_all(
    moments: LastMoments, entries: Iterable[Entry], steps: deque[Batch], samples: deque[Sample]
) -> None:
    for entry in entries:
        event = entry.event
        if isinstance(event, Batch):
            steps.append(event)
            moments.first = moments.first or event
            if moments.failure is not None:
                moments.failure, moments.survived = None, moments.survived + 1
        elif isinstance(event, Sample):
            samples.append(event)
        elif isinstance(event, Trace):
            moments.trace = event
            if event.step is not None:
                moments.traced_steps = [*moments.traced_steps, event.step][-_STEPS:]
                same = (step for step in reversed(steps) if step.step == event.step)
                moments.traced = next(same, None)
        else:
            _note(moments, event)


def _note(moments: LastMoments, event: object) -> None:
    if isinstance(event, OutOfMemory):
        moments.failure = event
    elif isinstance(event, Finding):
        moments.findings.append(event)
    elif isinstance(event, StepInputs):
        moments.largest = event
    elif isinstance(event, End):
        moments.end = event
    elif isinstance(event, Exit):
        moments.exit = event
    elif isinstance(event, Artifact):
        moments.reported |= event.kind == REPORT
        if event.kind in _MEMORY_KINDS and event.name not in moments.files:
            moments.files.append(event.name)
