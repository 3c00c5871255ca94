"""Highest memory of a session, for the line that ``finish`` prints."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from memlog._internal.units import format_bytes
from memlog.events import (
    Batch,
    Device,
    Epoch,
    Evaluation,
    Event,
    OutOfMemory,
    PeakSource,
    Phase,
    Recorded,
    Trace,
)

_HOST = "host"
_CATEGORIES_SHOWN = 3
_Measured: TypeAlias = Batch | Epoch | Evaluation | Recorded | Phase


class _Peak(NamedTuple):
    """Highest reading of one kind of memory."""

    size: int
    source: PeakSource | None
    event: _Measured


class PeakWatch:
    """Subscriber that keeps the highest memory, the largest trace and the failure that ended the run.

    The bus calls this object with every event, on the trainer's thread. To take little time,
    the object only compares numbers.

    Attributes:
        failure: Allocation that failed after ``last_step``; ``None``: no allocation failed.
        last_step: Last step that was published; ``None``: there was no step.
    """

    def __init__(self) -> None:
        self.failure: OutOfMemory | None = None
        self.last_step: int | None = None
        self._peaks: dict[str, _Peak] = {}
        self._capacity: dict[str, int | None] = {}
        self._trace: Trace | None = None
        self._traced = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Batch):
            self.last_step, self.failure = event.step, None
            self._take(event, event.rss_peak, event.rss_peak_source)
        elif isinstance(event, (Epoch, Phase)):
            self._take(event, event.rss_peak, event.rss_peak_source)
        elif isinstance(event, (Evaluation, Recorded)):
            self._take(event, None, None)
        elif isinstance(event, Device):
            self._capacity[event.name] = event.capacity
        elif isinstance(event, OutOfMemory):
            self.failure = event
        elif isinstance(event, Trace) and (event.peak or 0) > self._traced:
            self._trace, self._traced = event, event.peak or 0

    def _take(self, event: _Measured, peak: int | None, source: PeakSource | None) -> None:
        self._keep(_HOST, event.rss, peak, source, event)
        for device in event.devices:
            self._keep(device.name, device.allocated, device.peak, device.peak_source, event)

    def _keep(
        self,
        name: str,
        size: int | None,
        peak: int | None,
        source: PeakSource | None,
        event: _Measured,
    ) -> None:
        """Keep a reading if it is higher than all earlier readings of the memory ``name``.

        If a phase's exact peak equals the highest reading of another kind of event, keep the phase's peak.
        The phase shows where the peak was. If two phases have the same peak, keep the first phase, because
        an inner phase ends before the outer phase.
        """
        if peak is None:
            peak, source = size, "sampled"
        if peak is None:
            return
        known = self._peaks.get(name)
        names_it = isinstance(event, Phase) and source == "exact"
        if (
            known is None
            or peak > known.size
            or (names_it and peak == known.size and not isinstance(known.event, Phase))
        ):
            self._peaks[name] = _Peak(peak, source, event)

    def sentence(self, host_limit: int | None) -> str | None:
        """Return text with the peak, its limit and its step, and with a traced step's memory categories.

        The peak is the highest one of all accelerators. If there is no accelerator, it is the process's peak.
        Return ``None`` if no peak is known. The process may use ``host_limit`` bytes; ``None``: unknown.
        """
        if not self._peaks:
            return None
        devices = [name for name in self._peaks if name != _HOST]
        name = max(devices, key=lambda each: self._peaks[each].size, default=_HOST)
        peak = self._peaks[name]
        limit = host_limit if name == _HOST else self._capacity.get(name)
        of = f" of {format_bytes(limit)} ({peak.size / limit:.0%})" if limit else ""
        where = "" if name == _HOST else f" on {name}"
        return f"peak {format_bytes(peak.size)}{of}{where} {_when(peak)}{self._composition()}"

    def _composition(self) -> str:
        """Return the memory categories of the largest traced step as text; empty if no step was traced."""
        trace = self._trace
        if trace is None or not trace.at_peak:
            return ""
        ranked = sorted(trace.at_peak.items(), key=lambda item: -item[1])[:_CATEGORIES_SHOWN]
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in ranked)
        step = "a traced step" if trace.step is None else f"traced step {trace.step:,}"
        least = "" if trace.exact else "at least "
        return f"; {step} needed {least}{format_bytes(trace.peak)} in tensors: {listed}"


def _when(peak: _Peak) -> str:
    event = peak.event
    if isinstance(event, Evaluation):
        return f"at evaluation {event.evaluation:,}"
    if isinstance(event, Epoch):
        return f"by the end of epoch {event.epoch:,}"
    if isinstance(event, Phase) and peak.source == "exact":
        return f"in the phase {event.label}"
    if event.step is None:
        return "before the first step"
    # A watermark is the highest memory so far, so the peak may be of this step or of an earlier one.
    return f"{'by' if peak.source == 'watermark' else 'at'} step {event.step:,}"
