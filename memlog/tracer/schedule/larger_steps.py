"""Steps that need clearly more memory than the traced ones, after which a step is traced again."""

from __future__ import annotations

from memlog.events import Batch, Event

_LARGER = 1.1
"""Factor by which a step's peak must exceed the highest level of the traced steps."""
_LEAST = 16 * 1024**2
"""Bytes by which it must exceed that level, too: less may be noise of an allocator."""


class LargerSteps:
    """Subscriber that compares each step's peak with the highest level until the newest traced step.

    Peaks are those of the accelerators, or of the process if the run uses none.

    Attributes:
        seen: True if a step since the newest traced one had a peak well above the traced ones.
    """

    def __init__(self) -> None:
        self.seen = False
        self._marks: dict[str, int] = {}
        self._traced: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        """Handle one event."""
        if not isinstance(event, Batch):
            return
        for name, peak, rose in _peaks(event):
            self._marks[name] = peak
            level = self._traced.setdefault(name, peak)
            self.seen |= rose and peak >= max(_LARGER * level, level + _LEAST)

    def step_was_traced(self) -> None:
        """Compare later steps with the highest level until now: the newest step was traced."""
        self._traced = dict(self._marks)
        self.seen = False


def _peaks(batch: Batch) -> list[tuple[str, int, bool]]:
    """Return the name of each device (or the host), its highest level, and whether this step reached that."""
    devices = [
        (each.name, each.peak, each.peak_source == "exact")
        for each in batch.devices
        if each.peak is not None
    ]
    if devices or batch.rss_peak is None:
        return devices
    return [("host", batch.rss_peak, batch.rss_peak_source == "exact")]
