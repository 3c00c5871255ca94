"""Facts that only the HTML report shows: series of memory, marks on the charts, traced steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Literal, TypeAlias, get_args

import msgspec

from memlog.events import (
    ALLOCATED,
    DEVICE_USED,
    HOST_RSS,
    RESERVED,
    TREE,
    Alert,
    Artifact,
    Batch,
    Device,
    End,
    Epoch,
    Evaluation,
    Event,
    Finding,
    OutOfMemory,
    Recorded,
    Sample,
    Scope,
    Trace,
    readings,
)
from memlog.findings import failure_title
from memlog.journal import Entry, JournalFile, Position, RunDirectory
from memlog.journal.format import START
from memlog.reports.accumulator import Accumulator
from memlog.reports.page.drawings import MOST_POINTS, Chart, CurveFold
from memlog.reports.schema import Summary
from memlog.reports.summary import SummaryCache, journal_summary, summary_of
from memlog.reports.worst_step import RankingFold
from memlog.sink import Axis


class RunReader:
    """Reader of a run's journal, in bounded memory."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.series = SeriesFold()
        self.ranking = RankingFold()
        self.totals = Accumulator()
        self._files: dict[str, tuple[JournalFile, Position]] = {}

    def read(self, most: int | None = None, *, complete: bool = False) -> None:
        """Read at most ``most`` events that were not read before; ``None``: all of them.

        ``complete``: True if no process writes to the journal any more.
        """
        for process, entry in islice(self._unread(complete=complete), most):
            self.totals.take(process, entry)
            self.series.take(process, entry.event)
            self.ranking.take(entry.event)

    def _unread(self, *, complete: bool) -> Iterator[tuple[str, Entry]]:
        for listed in self.run.files():
            file, at = self._files.setdefault(listed.process, (listed, START))
            for entry in file.read(at, complete=complete):
                self._files[file.process] = (file, entry.end)
                yield file.process, entry

    def summary(self, end: End | None = None) -> Summary:
        """Read the unread part of the journal, and return the run's summary.

        ``end`` is the run's end, if the journal has none yet.
        """
        # Checked before reading: if the run ends in between, the journal has its end event when it is read.
        alive = self.run.is_alive()
        self.read(complete=not alive)
        return summary_of(self.run, self.totals, self._journal(), alive=alive, end=end)

    def cache_summary(self) -> None:
        """Cache the summary of a run that is over, so that even the first ``memlog show`` is quick.

        If an event follows, the cached summary is outdated.
        """
        alive = self.run.is_alive()
        cache = SummaryCache(self.run)
        self.read(complete=True)
        cache.save(journal_summary(self.run, self.totals, self._journal(), alive=alive))

    def _journal(self) -> list[JournalFile]:
        return [file for file, _ in self._files.values()]


MarkKind: TypeAlias = Literal[
    "failure", "growth", "alert", "trace", "epoch", "evaluation", "checkpoint", "file", "block"
]

_KINDS: tuple[MarkKind, ...] = get_args(MarkKind)
"""Kinds of marks, the most important first. Marks at one index are in this order."""
UNLISTED: tuple[MarkKind, ...] = ("trace", "epoch", "evaluation")
"""Kinds of marks that only the charts show, because there are many."""
_MOST_MARKS = 400
"""Maximum number of marks of one kind. Further marks are only counted."""
_MOST_TRACES = 1_000
_HOST = "host"
_CHECKPOINT = ("checkpoint", "ckpt", "weights", "state_dict")
"""Words in a file's name or kind, or in a block's label, that indicate the saving of a model."""


class ChartMark(msgspec.Struct, frozen=True):
    """Mark on the charts at one index. An index is the number of a step, an evaluation or an epoch."""

    kind: MarkKind
    at: int
    text: str


class RunSeries(msgspec.Struct, frozen=True):
    """Memory over the run, with marks and traced steps."""

    axis: Axis
    charts: list[Chart]
    """Charts of the accelerators, then of the host; empty if no memory was read."""
    marks: list[ChartMark]
    omitted: int
    """Number of marks that are left out, because at most `_MOST_MARKS` marks of one kind are kept. Marks of
    the kinds in `UNLISTED` are not counted here."""
    traces: list[Trace]
    """Events about the traced steps, oldest first."""


def run_series(run: RunDirectory, *, points: int = MOST_POINTS) -> RunSeries:
    fold = SeriesFold(points)
    for file in run.files():
        for entry in file.read():
            fold.take(file.process, entry.event)
    return fold.series()


class SeriesFold:
    """Series of a run, in bounded memory: each line of a chart has at most ``points`` values."""

    def __init__(self, points: int = MOST_POINTS) -> None:
        self._points = points
        self._axes: dict[Axis, dict[str, CurveFold]] = {"step": {}, "evaluation": {}, "epoch": {}}
        self._devices: dict[str, Device] = {}
        self._limit: int | None = None
        self._marks: list[tuple[Axis, ChartMark]] = []
        self._counts: Counter[MarkKind] = Counter()
        self._traces: list[Trace] = []
        self._steps: dict[str, int] = {}
        """Number of the last step that each process recorded, by the process's name."""

    def take(self, process: str, event: Event) -> None:
        """Add an event of a process, in the journal's order."""
        if isinstance(event, Batch):
            self._steps[process] = event.step
            self._read("step", event.step, event)
        elif isinstance(event, Sample):
            self._take_sample(event)
        else:
            self._take_rare(event, self._steps.get(process))

    def _take_sample(self, event: Sample) -> None:
        # An older memlog recorded the container's limit only.
        limit = event.cgroup_limit if event.host_limit is None else event.host_limit
        self._limit = self._limit if limit is None else limit
        if event.step is None:
            return
        for reading in readings(event):
            if reading.name == TREE and (event.tree_processes or 1) > 1:
                fold = self._fold("step", _HOST)
                fold.add("with child processes", "tree", event.step, reading.level)
            elif reading.name.endswith(DEVICE_USED) and reading.owner in self._axes["step"]:
                fold = self._fold("step", reading.owner)
                fold.add("all processes", "tree", event.step, reading.level)

    def _take_rare(self, event: Event, step: int | None) -> None:
        if isinstance(event, Device):
            self._devices[event.name] = event
        elif isinstance(event, Trace):
            if len(self._traces) < _MOST_TRACES:
                self._traces.append(event)
            self._mark("step", "trace", event.step, "traced step")
        elif isinstance(event, Epoch):
            self._read("epoch", event.epoch, event)
            self._mark("step", "epoch", event.step, f"end of epoch {event.epoch:,}")
        elif isinstance(event, Evaluation):
            self._read("evaluation", event.evaluation, event)
            self._mark("step", "evaluation", step, f"evaluation {event.evaluation:,}")
        else:
            self._take_mark(event, step)

    def _take_mark(self, event: Event, step: int | None) -> None:
        if isinstance(event, Alert):
            self._mark("step", "alert", event.step, f"{event.level}: {event.title}")
            if event.step is None:
                self._mark("evaluation", "alert", event.evaluation, event.title)
        elif isinstance(event, Finding):
            self._mark("step", "growth", event.since_step, f"growth begins: {event.title}")
        elif isinstance(event, OutOfMemory):
            self._mark("step", "failure", step, failure_title(event, step))
        elif isinstance(event, Artifact):
            kind = _kind_of("file", event.kind, event.name)
            self._mark("step", kind, step, f"file saved: {event.name}")
        elif isinstance(event, (Scope, Recorded)):
            self._mark("step", _kind_of("block", event.label), event.step, event.label)

    def _read(self, axis: Axis, index: int, event: Batch | Epoch | Evaluation) -> None:
        for reading in readings(event):
            name, fold = reading.name, self._fold(axis, reading.owner)
            if name == HOST_RSS:
                fold.add("resident set", "level", index, reading.level)
                fold.add("peak so far", "peak", index, reading.peak)
            elif name.endswith(ALLOCATED):
                fold.add("allocated", "level", index, reading.level)
                fold.add("peak", "peak", index, reading.peak)
            elif name.endswith(RESERVED):
                fold.add("reserved", "reserved", index, reading.level)

    def _fold(self, axis: Axis, name: str) -> CurveFold:
        known = self._axes[axis]
        if name not in known:
            known[name] = CurveFold(self._points)
        return known[name]

    def _mark(self, axis: Axis, kind: MarkKind, at: int | None, text: str) -> None:
        if at is None:
            return
        self._counts[kind] += 1
        if self._counts[kind] <= _MOST_MARKS:
            self._marks.append((axis, ChartMark(kind, at, text)))

    @property
    def has_readings(self) -> bool:
        return any(not fold.is_empty for folds in self._axes.values() for fold in folds.values())

    def series(self) -> RunSeries:
        """Return the series on one axis: steps if there are any, else evaluations, else epochs."""
        axis: Axis = next((axis for axis, folds in self._axes.items() if folds), "step")
        folds = self._axes[axis]
        names = sorted(folds, key=lambda name: (name == _HOST, name))
        return RunSeries(
            axis=axis,
            charts=[self._chart(name, folds[name]) for name in names if not folds[name].is_empty],
            marks=sorted(
                dict.fromkeys(mark for on, mark in self._marks if on == axis),
                key=lambda m: (m.at, _KINDS.index(m.kind)),
            ),
            omitted=sum(
                max(count - _MOST_MARKS, 0)
                for kind, count in self._counts.items()
                if kind not in UNLISTED
            ),
            traces=sorted(self._traces, key=lambda trace: trace.time_us),
        )

    def _chart(self, name: str, fold: CurveFold) -> Chart:
        if name == _HOST:
            return fold.chart(name, "Host memory", self._limit)
        device = self._devices.get(name)
        product = None if device is None else device.product
        title = f"{name} ({product})" if product else name
        return fold.chart(name, title, None if device is None else device.capacity)


def _kind_of(otherwise: MarkKind, *texts: str) -> MarkKind:
    """Return ``checkpoint`` if one of the texts indicates that a model is saved, else ``otherwise``."""
    saves = any(word in text.lower() for text in texts for word in _CHECKPOINT)
    return "checkpoint" if saves else otherwise
