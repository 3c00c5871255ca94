"""Aggregate the facts for the verdict on a run, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping

from memlog._internal.units import format_bytes
from memlog.events import Batch, Device, Event, Finding, OutOfMemory, Sample
from memlog.reports.aggregates import UNKNOWN, peak_kind
from memlog.reports.level_fold import HOST, MIN_STEPS, LevelFold
from memlog.reports.schema import Peak, RunStatus
from memlog.reports.verdict import after_step, failure_title, ranked, sentence


class VerdictFold:
    """Findings, memory in use after the steps, limits, and the failure that ended the run."""

    def __init__(self) -> None:
        self._levels = LevelFold()
        self._findings: list[Finding] = []
        self._failure: OutOfMemory | None = None
        self._host_limit: int | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Batch):
            self._levels.take(event)
            self._failure = None
        elif isinstance(event, Finding):
            self._findings.append(event)
        elif isinstance(event, OutOfMemory):
            self._failure = event
        elif isinstance(event, Sample) and event.host_limit is not None:
            self._host_limit = event.host_limit

    @property
    def findings(self) -> list[Finding]:
        return ranked(self._findings)

    def verdict(
        self,
        status: RunStatus,
        last_step: int | None,
        peaks: Mapping[str, Peak],
        devices: Mapping[str, Device],
    ) -> str:
        """Return the verdict: the most important finding. If the run ended badly, the end comes first.

        If nothing was found, the verdict describes the memory of the first accelerator. If the run has no
        accelerator, the verdict describes the memory of the process. ``last_step`` is ``None`` if no step was
        complete.
        """
        findings, failure = self.findings, self._bad_end(status, last_step)
        growth = sentence(findings[0]) if findings else self._no_growth(last_step, peaks, devices)
        return growth if failure is None else f"{failure}. {growth}"

    def _no_growth(
        self, last_step: int | None, peaks: Mapping[str, Peak], devices: Mapping[str, Device]
    ) -> str:
        name, limit = HOST, self._host_limit
        if self._levels.devices:
            name = self._levels.devices[0]
            device = devices.get(name)
            limit = None if device is None else device.capacity
        peak = peaks.get(peak_kind(name), UNKNOWN).bytes
        of = "" if limit is None else f" of {format_bytes(limit)}"
        reached = "the peak is unknown" if peak is None else f"peak {format_bytes(peak)}{of}"
        steps = 0 if last_step is None else last_step + 1
        since = self._levels.steady_since(name)
        if steps == 0:
            return f"Without steps, growth is not judged: {reached}."
        if steps < MIN_STEPS:
            return f"Too few steps to judge growth ({steps}): {reached}."
        if since is None:
            return f"No lasting growth was found in {steps:,} steps: {reached}."
        return f"No growth: {reached}, steady since step {since:,}."

    def _bad_end(self, status: RunStatus, last_step: int | None) -> str | None:
        if self._failure is not None and status != "finished":
            return failure_title(self._failure, last_step)
        return f"Ended unexpectedly {after_step(last_step)}" if status == "killed" else None
