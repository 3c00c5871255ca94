"""Traces of a session. All of them are published, and the most representative one is kept.

After such a step, the tracer traces another step as soon as the budget allows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memlog._internal.safe_files import replacing
from memlog.events import CUT, Batch, Event, Trace, TracedLayer, TracedLine, now_us, peak_readings
from memlog.facts.levels import WORSE
from memlog.trace.encoding import OUTSIDE_PATH
from memlog.trace.records import LayerFigures, RecordedTrace, TraceResult
from memlog.tracer.schedule.iteration import OptimizerRefs

TOP = 8
"""Number of the largest layers in a trace event. The event also contains the layers that trackers plot as
curves (see `MAX_SERIES`)."""
MAX_SERIES = 12
"""Maximum number of layers that trackers plot as curves over the steps of a run. Further layers get no
curve."""
TOP_LINES = 4
"""Maximum number of the program's lines in a trace event."""


def trace_event(
    result: TraceResult,
    step: int | None,
    skipped: int = 0,
    series: set[str] | None = None,
) -> Trace:
    """Return the event of one traced step.

    Args:
        result: Result of the trace.
        step: Number of the step; ``None`` if the step did not end.
        skipped: Number of traces that were skipped so far.
        series: Paths of this run's layers that trackers plot as curves over the steps. The function adds the
            largest layers of this trace until there are `MAX_SERIES` paths. Paths are never removed, so each
            curve continues even if another layer is larger in a later trace. ``None``: the run has only this
            trace.
    """
    series = set() if series is None else series
    ranked = sorted(result.layers, key=_rank)
    for layer in ranked[:TOP]:
        if len(series) < MAX_SERIES:
            series.add(layer.path)
    told = ranked[:TOP] + [layer for layer in ranked[TOP:] if layer.path in series]
    held = sum(share.size for share in result.shares if share.path == OUTSIDE_PATH)
    readable = result.peak is not None
    return Trace(
        time_us=now_us(),
        step=step,
        engine=result.engine,
        exact=result.exactness == "exact",
        peak=result.peak,
        at_peak=result.categories,
        layers=tuple(
            _layer(layer, readable=readable, in_series=layer.path in series) for layer in told
        ),
        unattributed=held if result.shares else None,
        truncated=result.truncated,
        duration_us=round(result.duration_ms * 1000),
        skipped=skipped,
        lines=tuple(
            TracedLine(line.line, line.at_peak) for line in result.lines[:TOP_LINES] if line.at_peak
        ),
        device=_device_name(result.device),
    )


def _device_name(device: str) -> str:
    """Return the name of a traced device in events, such as ``cuda0`` for ``cuda:0``."""
    kind, _, index = device.partition(":")
    return "host" if kind == "cpu" else f"{kind}{index or 0}"


def _rank(layer: LayerFigures) -> tuple[int, int, str]:
    return -(layer.at_peak or 0), -(layer.added or 0), layer.path


def _layer(layer: LayerFigures, *, readable: bool, in_series: bool) -> TracedLayer:
    forward = layer.phase("forward")
    nothing = 0 if readable else None
    return TracedLayer(
        path=layer.path,
        at_peak=layer.at_peak,
        peak=layer.peak,
        allocated=layer.allocated,
        kept=forward.kept if forward is not None else nothing,
        added=layer.added,
        in_series=in_series,
    )


_PART = (
    "The trace is not of a whole training iteration: an optimizer that takes part made no step in it, so "
    "peaks are lower bounds."
)

FROZEN_START_MISSED = (
    "The trace begins at the first module that is called with gradients. Other modules were called before "
    "it, probably in the same step. Their allocations are missing, so peaks are lower bounds."
)


class StepTrace(NamedTuple):
    """A trace of a session, with the facts that decide whether it is kept."""

    trace: RecordedTrace
    event: Trace
    """Event to publish."""
    members: OptimizerRefs
    """Optimizers that stepped in the trace."""
    whole: bool
    """True if the trace is known or assumed to cover a whole training iteration."""
    warm: bool
    """True if no optimizer created its state in the trace."""

    @property
    def rank(self) -> int:
        """Number from 0 to 2. A higher number means that the trace better represents untraced steps."""
        return self.whole + (self.whole and self.warm)

    def as_partial(self, why: str = _PART) -> StepTrace:
        """Return the same trace, marked as covering only a part of an iteration."""
        result = self.trace.result
        exactness = "lower bound" if result.exactness == "exact" else result.exactness
        partial = msgspec.structs.replace(result, exactness=exactness, unseen=(*result.unseen, why))
        trace = msgspec.structs.replace(self.trace, result=partial)
        event = msgspec.structs.replace(self.event, exact=False, cut=why is CUT)
        return self._replace(trace=trace, event=event, whole=False)


class KeptTrace:
    """Trace that a session keeps in a file. All traces of the session are published.

    Attributes:
        members: Optimizers that stepped in the kept trace.
    """

    def __init__(self, kept: Path, publish: Callable[[Event], object]) -> None:
        self.members: OptimizerRefs = ()
        self._file = kept
        self._publish = publish
        self._rank = self._peak = -1
        self._kept_us: int | None = None
        self._undecided: tuple[StepTrace, bool] | None = None

    def add(self, step_trace: StepTrace, *, outdated: bool = False) -> None:
        """Publish a trace, and keep it if it is more representative than the kept one.

        ``outdated``: True if the kept trace lacks an optimizer that takes part now.
        """
        if outdated:
            # With this rank, any trace replaces the kept one.
            self._rank = -1
        kept = self._keep_if_more_representative(step_trace)
        self._publish(msgspec.structs.replace(step_trace.event, kept=kept))

    def add_undecided(self, step_trace: StepTrace, *, whole: bool) -> None:
        """Add the first trace of a session, and publish it later.

        ``whole``: Guess whether the trace covers a whole iteration. `optimizer_begins` replaces the guess.
        """
        self._undecided = step_trace, whole
        self._keep_if_more_representative(step_trace if whole else step_trace.as_partial())

    def optimizer_begins(self, optimizer: Any) -> None:
        """Decide whether the first trace is whole, and publish it. Call this at the next optimizer step."""
        if self._undecided is not None:
            # If an optimizer steps that made no step in the trace, the trace is not of a whole iteration.
            members = self._undecided[0].members
            self.decide(whole=any(member() is optimizer for member in members))

    def optimizer_ended(self, optimizer: Any) -> None:
        """Assign the first trace to ``optimizer`` if no optimizer step began in the trace.

        In this case, the trace began inside a step of ``optimizer``. This step ends now.
        """
        if self._undecided is not None and not self._undecided[0].members:
            step_trace, whole = self._undecided
            self._undecided = step_trace._replace(members=(weakref.ref(optimizer),)), whole

    def finish(self, *, outdated: bool) -> None:
        """Publish the first trace, unless it is published already. Call this at the end of the session.

        ``outdated``: True to mark the kept trace as covering only a part of an iteration.
        """
        self.decide()
        if outdated and self._rank > 0:
            kept = msgspec.msgpack.decode(self._file.read_bytes(), type=tuple[Trace, RecordedTrace])
            event, trace = kept
            self._keep(StepTrace(trace, event, self.members, whole=True, warm=False).as_partial())

    def decide(self, *, whole: bool | None = None) -> None:
        """Publish the first trace, unless it is published already. Call this after the next step.

        ``whole``: True if the trace covers a whole iteration; ``None``: use the guess from `add_undecided`.
        """
        if self._undecided is None:
            return
        (step_trace, assumed), self._undecided = self._undecided, None
        whole = assumed if whole is None else whole
        decided = step_trace if whole else step_trace.as_partial()
        # The file has the trace as the guess has marked it.
        if whole != assumed:
            self._keep(decided)
        event = decided.event
        kept = self._kept_us == event.time_us
        self._publish(msgspec.structs.replace(event, kept=kept))

    def _keep_if_more_representative(self, step_trace: StepTrace) -> bool:
        """Keep a trace if it is more representative than the kept one. Return True if it is kept.

        If the new trace has a higher `StepTrace.rank`, keep it. Exception: the kept trace covers a whole
        iteration and has a clearly higher peak. If both ranks are equal, or if the new trace is of a failed
        step, keep the new trace if its peak is clearly higher.
        """
        peak = step_trace.event.peak
        if peak is None:
            return False
        larger = peak > self._peak * WORSE
        failed = step_trace.event.step is None and step_trace.event.exact
        same = step_trace.rank == self._rank or failed
        fuller = step_trace.rank > self._rank and (self._rank < 1 or peak > self._peak / WORSE)
        if (same and larger) or fuller:
            self._keep(step_trace)
            return True
        return False

    def _keep(self, step_trace: StepTrace) -> None:
        """Write a trace to the file. The helper process makes the flame graph, a slow task."""
        self.members = step_trace.members
        self._rank, self._peak = step_trace.rank, step_trace.event.peak or 0
        self._kept_us = step_trace.event.time_us
        with replacing(self._file.parent, self._file.name) as file:
            file.write(msgspec.msgpack.encode((step_trace.event, step_trace.trace)))


_LARGER = 1.1
"""Factor. The peak of a larger step is at least this factor times the reference peak (see `LargerSteps`)."""
_LEAST = 16 * 1024**2
"""Bytes. The peak of a larger step is at least this many bytes above the reference peak. A smaller difference
may be noise of an allocator."""


class LargerSteps:
    """Subscriber that compares each step's peak with a reference peak.

    The reference peak is the highest peak that was known when the newest trace ended. The peaks are those of
    the accelerators, or of the process if the run uses no accelerator.

    Attributes:
        seen: True if a step after the newest trace had a peak clearly above the reference peak.
    """

    def __init__(self) -> None:
        self.seen = False
        self._marks: dict[str, int] = {}
        self._traced: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Batch):
            return
        for reading in peak_readings(event):
            if reading.peak is not None:
                self._marks[reading.name] = reading.peak
                level = self._traced.setdefault(reading.name, reading.peak)
                rose = reading.source == "exact"
                self.seen |= rose and reading.peak >= max(_LARGER * level, level + _LEAST)

    def step_was_traced(self) -> None:
        """Record that a step was traced. Compare later steps with the highest peak so far."""
        self._traced = dict(self._marks)
        self.seen = False
