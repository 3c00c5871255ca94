"""The highest value of each kind of memory over a run."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memlog.events import (
    ALLOCATED,
    HOST_PEAKS,
    HOST_RSS,
    OTHER_PROCESSES,
    RESERVED,
    TREE,
    Batch,
    Evaluation,
    Event,
    PeakSource,
    Phase,
    Reading,
)

_TRUST: dict[PeakSource | None, int] = {None: 0, "sampled": 1, "watermark": 2, "exact": 3}
"""Priority of a reading's source. Of equal readings, only the reading with the highest priority is kept."""


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The highest value of one kind of memory over the run."""

    bytes: int | None
    source: PeakSource | None
    step: int | None
    """Last step that was complete when the peak was read; ``None`` if the peak was not read at a step."""
    evaluation: int | None
    """Number of the evaluation (call of a loss function) at which the peak was read; ``None``: none."""
    after_step: bool = False
    """True if the peak was read after ``step``, as a phase of the program ended."""

    @property
    def at_step(self) -> str:
        """Return ``at step 5`` or ``after step 5``; empty if the peak was not read at a step."""
        preposition = "after" if self.after_step else "at"
        return "" if self.step is None else f"{preposition} step {self.step:,}"

    @property
    def place(self) -> str:
        """Return where in the run the peak was read, such as ``step 5``; empty if that is unknown."""
        if self.step is not None:
            return self.at_step.removeprefix("at ")
        return "" if self.evaluation is None else f"evaluation {self.evaluation:,}"


UNKNOWN = Peak(bytes=None, source=None, step=None, evaluation=None)


def peak_kind(name: str) -> str:
    """Return the kind of memory that is shown as the peak of ``name``, such as ``cuda0.allocated``."""
    return HOST_RSS if name == "host" else name + ALLOCATED


class PeakFold:
    """The highest value of each kind of memory, with its source and its step.

    A kind is one of `HOST_PEAKS`, or a device's: ``<device>.allocated``, ``<device>.reserved`` or
    ``<device>.other_processes``.
    """

    def __init__(self) -> None:
        self._peaks = {HOST_RSS: UNKNOWN, TREE: UNKNOWN}
        self._has_steps = False

    def expect(self, device: str) -> None:
        """Add a device's missing kinds of memory, ``allocated`` and ``reserved``, with unknown peaks."""
        for kind in (device + ALLOCATED, device + RESERVED):
            self._peaks.setdefault(kind, UNKNOWN)

    def take(self, event: Event, found: Iterable[Reading]) -> None:
        """Add the readings of one event. If sizes are equal, the `_TRUST` of the source decides."""
        self._has_steps = self._has_steps or isinstance(event, Batch)
        after = self._has_steps and isinstance(event, Phase)
        for each in found:
            name = each.name
            if each.device is None and not (name in HOST_PEAKS or name.endswith(OTHER_PROCESSES)):
                continue
            size, source = each.highest
            if size is None:
                continue
            peak = self._peaks.get(name, UNKNOWN)
            if peak.bytes is not None and size < peak.bytes:
                continue
            if peak.bytes is None or (size, _TRUST[source]) > (peak.bytes, _TRUST[peak.source]):
                at = event.evaluation if isinstance(event, Evaluation) else None
                step = None if at is not None else getattr(event, "step", None)
                self._peaks[name] = Peak(
                    bytes=size, source=source, step=step, evaluation=at, after_step=after
                )

    def of(self, kind: str, otherwise: Peak) -> Peak:
        return self._peaks.get(kind, otherwise)

    def summary(self) -> dict[str, Peak]:
        return dict(sorted(self._peaks.items()))
