"""State of a run while the run goes on. Each part of the run's journal is read only once."""

from __future__ import annotations

from collections import deque

import msgspec

from memlog.events import (
    ALLOCATED,
    HOST_RSS,
    TREE,
    Batch,
    Epoch,
    Evaluation,
    Loss,
    PeakSource,
    Sample,
    main_readings,
)
from memlog.facts.levels import UNKNOWN
from memlog.facts.run_fold import RunStatus
from memlog.facts.verdict import verdict
from memlog.journal import Entry, Position, RunDirectory
from memlog.journal.format import START
from memlog.journal.run_names import names_of
from memlog.reports.accumulator import Accumulator, History
from memlog.reports.schema import AlertFacts, FindingFacts
from memlog.reports.summary import alert_facts, finding_facts, iso_time

SCHEMA = 1
ALERTS_SHOWN = 5
"""Maximum number of alerts that the document lists, the newest last."""
_RATE_OVER_US = 10_000_000
"""Microseconds of the period in which memlog measures steps per second. The newest step ends the period."""
_RATE_STEPS = 1_000
"""Maximum number of steps from which memlog measures the steps per second. The newest steps are used."""


class LiveMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of memory: bytes in use now, their peak, and their limit. ``None``: unknown."""

    name: str
    """``host.rss`` (the process), ``host.tree`` (with its child processes), or the device's name."""
    current_bytes: int | None
    """Memory in use now; of a device: allocated."""
    peak_bytes: int | None
    """Highest memory in use."""
    peak_source: PeakSource | None
    """How the peak was obtained."""
    peak_step: int | None
    """Step of the peak."""
    limit_bytes: int | None
    """Bytes that the process and its child processes may use together, or the device's capacity."""
    history_bytes: list[int]
    """Memory in use, as at most 120 values from the first step to the last. Each value is the highest of
    several steps."""


class LiveRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a distributed training."""

    rank: int
    """The rank's number."""
    run: str
    """The id of the rank's run."""
    status: RunStatus
    step: int | None
    """The rank's last step."""
    memory: LiveMemory | None
    """Memory of the rank's accelerator, or of its process if the rank has no accelerator."""
    alerts: int
    """Number of the rank's alerts."""


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """Document of ``memlog watch --json``. While `SCHEMA` is unchanged, fields are only added."""

    schema: int = SCHEMA
    """Version of the document."""
    run: str
    """The run's id."""
    directory: str
    """The run's folder."""
    names: list[str]
    """Name passed to ``init``, followed by the names and ids that the run has in trackers."""
    status: RunStatus
    step: int | None
    """Last step; ``None``: there was none."""
    evaluation: int | None
    """Last evaluation of a watched loss."""
    epoch: int | None
    """Last epoch."""
    loss: float | None
    """Last loss."""
    steps_per_s: float | None
    """Steps per second over the last ten seconds."""
    elapsed_s: float | None
    """Seconds from the run's start to its end; until then, to its newest event."""
    newest_event: str | None
    """Time of the newest event, in ISO 8601."""
    memory: list[LiveMemory]
    verdict: str
    """The most important finding with its growth and forecast, else a sentence saying that nothing grew."""
    findings: list[FindingFacts]
    alerts: list[AlertFacts]
    """The newest five alerts, the newest last."""
    alerts_total: int
    """Number of all alerts."""
    ranks: list[LiveRank]
    """All ranks of a distributed training, including this run's rank; empty if the run trains alone."""
    dropped: int
    """Number of events that memlog lost."""
    faults: int
    """Number of errors inside memlog."""


class LiveRun:
    """Reader of one run's journal while the run goes on."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._totals = Accumulator()
        self._positions: dict[str, Position] = {}
        self._histories: dict[str, History] = {}
        self._current: dict[str, int | None] = {}
        self._host_limit: int | None = None
        self._epoch: int | None = None
        self._evaluation: int | None = None
        self._loss: float | None = None
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RATE_STEPS)
        self._alive = True

    def update(self) -> None:
        """Read what was written since the last call.

        Raises:
            OSError: The run's folder can't be read.
        """
        # Checked before reading: if the run ends in between, the journal has its end event when it is read.
        self._alive = self.run.is_alive()
        for file in self.run.files():
            for entry in file.read(self._positions.get(file.process, START)):
                self._take(file.process, entry)
                # Stored after each event: if reading fails later, no event is counted twice.
                self._positions[file.process] = entry.end

    @property
    def status(self) -> RunStatus:
        """Status of the run at the last `update`; ``killed`` if its process ended without an end event."""
        return self._totals.facts.status(alive=self._alive)

    def _take(self, process: str, entry: Entry) -> None:
        self._totals.take(process, entry)
        event = entry.event
        if isinstance(event, (Batch, Evaluation)):
            for reading in main_readings(event):
                self._level(
                    reading.name if reading.device is None else reading.owner, reading.level
                )
        if isinstance(event, Batch):
            self._recent.append((event.time_us, event.step))
        elif isinstance(event, Sample):
            self._current[TREE] = event.tree_pss
            # A journal of an older memlog has only the limit of the control group.
            self._host_limit = event.host_limit or event.cgroup_limit or self._host_limit
        elif isinstance(event, Loss):
            self._loss = event.value
        elif isinstance(event, Epoch):
            self._epoch = event.epoch
        elif isinstance(event, Evaluation):
            self._evaluation = event.evaluation
            self._loss = event.value

    def _level(self, name: str, size: int | None) -> None:
        self._current[name] = size
        if size is not None:
            self._histories.setdefault(name, History()).add(size)

    def state(self, ranks: list[LiveRank]) -> LiveState:
        """Return the run's state at the last `update`.

        ``ranks`` has the rows of all ranks of the training. It is empty if the run trains alone.
        """
        totals, header = self._totals, self.run.trainer()
        begun, newest = header.begun_us if header else None, totals.newest_us
        last = totals.last_us
        alerts = sorted(totals.alerts, key=lambda alert: alert.time_us)
        health = [event for event, _ in totals.health.values()]
        return LiveState(
            run=self.run.id,
            directory=str(self.run.path),
            names=names_of(self.run),
            status=self.status,
            step=totals.facts.last_step,
            evaluation=self._evaluation,
            epoch=self._epoch,
            loss=self._loss,
            steps_per_s=self._steps_per_s(),
            elapsed_s=None if begun is None or last is None else (last - begun) / 1e6,
            newest_event=iso_time(newest),
            memory=self._memory(),
            verdict=verdict(totals.facts, self.status).text,
            findings=[finding_facts(event) for event in totals.facts.findings(self.status)],
            alerts=[alert_facts(event) for event in alerts[-ALERTS_SHOWN:]],
            alerts_total=len(alerts) + totals.omitted["alerts"],
            ranks=ranks,
            dropped=sum(totals.dropped.values())
            + sum(sum(event.dropped.values()) for event in health),
            faults=sum(sum(event.faults.values()) for event in health),
        )

    def as_rank(self, rank: int) -> LiveRank:
        """Return this run's row among the ranks of a training."""
        memory = self._memory()
        # `memory` has the accelerators last. The row shows one of them, else the host.
        return LiveRank(
            rank=rank,
            run=self.run.id,
            status=self.status,
            step=self._totals.facts.last_step,
            memory=next((kind for kind in memory[::-1] if kind.name != TREE), None),
            alerts=len(self._totals.alerts),
        )

    def _memory(self) -> list[LiveMemory]:
        devices = [name for name in self._current if name not in (HOST_RSS, TREE)]
        kinds = [name for name in (HOST_RSS, TREE) if self._current.get(name) is not None]
        return [self._one(name) for name in (*kinds, *sorted(devices))]

    def _one(self, name: str) -> LiveMemory:
        kind, limit = name, self._host_limit
        if name not in (HOST_RSS, TREE):
            device = self._totals.facts.devices.get(name)
            kind, limit = name + ALLOCATED, None if device is None else device.capacity
        peak = self._totals.facts.peaks.of(kind, UNKNOWN)
        history = self._histories.get(name)
        return LiveMemory(
            name=name,
            current_bytes=self._current.get(name),
            peak_bytes=peak.bytes,
            peak_source=peak.source,
            peak_step=peak.step,
            limit_bytes=limit,
            history_bytes=[] if history is None else history.values(),
        )

    def _steps_per_s(self) -> float | None:
        if self.status != "running" or len(self._recent) < 2:  # noqa: PLR2004 - a rate needs two
            return None
        last_us, last = self._recent[-1]
        first_us, first = next(
            (when, step) for when, step in self._recent if when >= last_us - _RATE_OVER_US
        )
        if first == last:  # one step takes longer than `_RATE_OVER_US`
            first_us, first = self._recent[-2]
        return (last - first) / (last_us - first_us) * 1e6 if last_us > first_us else None
