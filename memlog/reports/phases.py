"""Aggregate the phases of the program by label, and find the phase that made the run's peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memlog._internal.units import format_bytes
from memlog.events import Phase, main_readings
from memlog.facts.levels import UNKNOWN, Peak, peak_kind
from memlog.reports.labels import MAX_LABELS
from memlog.reports.schema import PhaseFacts, PhasePeak


class PhaseFold:
    """Counts, durations and peaks by label."""

    def __init__(self) -> None:
        self.omitted = 0
        """Number of phases whose labels are beyond the first `MAX_LABELS`."""
        self._by_label: dict[str, _Phases] = {}
        self._makers: dict[str, _Maker] = {}

    def take(self, event: Phase) -> None:
        """Add a phase that has ended. Nested phases are added before the phase that contains them."""
        if event.label not in self._by_label and len(self._by_label) >= MAX_LABELS:
            self.omitted += 1
            return
        self._by_label.setdefault(event.label, _Phases()).take(event)
        for each in main_readings(event):
            if each.peak is not None and each.source == "exact":
                made = _Maker(each.peak, len(event.within), event.label)
                known = self._makers.get(each.owner)
                if known is None or made[:2] > known[:2]:
                    self._makers[each.owner] = made

    def facts(self, peaks: Mapping[str, Peak]) -> dict[str, PhaseFacts]:
        """Return the facts about each label's phases, by label.

        Each label is followed by the labels nested in it. Otherwise, labels are in the order in which their
        first phases ended. ``peaks`` are the run's peaks.
        """
        made = {
            name: maker.label
            for name, maker in self._makers.items()
            if maker.size >= (peaks.get(peak_kind(name), UNKNOWN).bytes or 0)
        }
        order = {label: index for index, label in enumerate(self._by_label)}
        path = {
            label: [order.get(each, 0) for each in (*phases.within, label)]
            for label, phases in self._by_label.items()
        }
        return {
            label: self._by_label[label].facts(label, made)
            for label in sorted(self._by_label, key=path.__getitem__)
        }


class _Maker(NamedTuple):
    """Innermost phase with the highest exact peak of one kind of memory."""

    size: int
    depth: int
    label: str


class _Phases:
    def __init__(self) -> None:
        self._count = self._errors = self._duration_us = 0
        self.within: tuple[str, ...] = ()
        self._exact: dict[str, tuple[int, int | None]] = {}
        self._read: dict[str, int] = {}

    def take(self, event: Phase) -> None:
        self._count += 1
        self._errors += event.error is not None
        self._duration_us += event.duration_us
        self.within = event.within
        for each in main_readings(event):
            name, peak = each.owner, each.peak
            self._read[name] = max(event.highest.get(name, 0), self._read.get(name, 0))
            known = self._exact.get(name)
            if each.source == "exact" and peak is not None and (known is None or peak > known[0]):
                self._exact[name] = (peak, event.step)

    def facts(self, label: str, made: Mapping[str, str]) -> PhaseFacts:
        return PhaseFacts(
            count=self._count,
            errors=self._errors,
            duration_s=self._duration_us / 1e6,
            within=list(self.within),
            peaks={
                name: PhasePeak(
                    exact_bytes=self._exact[name][0] if name in self._exact else None,
                    exact_step=self._exact[name][1] if name in self._exact else None,
                    at_least_bytes=max(read, self._exact.get(name, (0, None))[0]) or None,
                    made_the_peak=made.get(name) == label,
                )
                for name, read in self._read.items()
            },
        )


def known_peak(peak: PhasePeak) -> str:
    """Return the highest peak of a label's phases as text, with "at least" if it is only a lower bound."""
    size = format_bytes(peak.at_least_bytes)
    return size if peak.exact_bytes == peak.at_least_bytes else f"at least {size}"
