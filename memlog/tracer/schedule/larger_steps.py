"""Detection of steps that need clearly more memory than the traced steps.

After such a step, the tracer traces another step as soon as the budget allows.
"""

from __future__ import annotations

from memlog.events import Batch, Event, peak_readings

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
        for each in peak_readings(event):
            if each.peak is not None:
                self._marks[each.name] = each.peak
                level = self._traced.setdefault(each.name, each.peak)
                rose = each.source == "exact"
                self.seen |= rose and each.peak >= max(_LARGER * level, level + _LEAST)

    def step_was_traced(self) -> None:
        """Record that a step was traced. Compare later steps with the highest peak so far."""
        self._traced = dict(self._marks)
        self.seen = False
