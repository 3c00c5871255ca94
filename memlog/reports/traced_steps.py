"""The steps of a run that were traced, from their events alone."""

from __future__ import annotations

from memlog.events import Event, Trace

WORSE = 1.01
"""By so much a peak must exceed the worst one's for its step to take its place."""


class TraceFold:
    """Counts them and finds the worst, as the tracer does that keeps its events.

    Attributes:
        steps: How many.
        worst: That which needed most. One that is not exact is so only where none is; and the first, in which
            an optimizer's state may not have been there yet, where it is not by far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.worst: Trace | None = None
        self._worst_is_first = False

    def take(self, event: Event) -> None:
        """Folds in an event; what is no trace says nothing here."""
        if not isinstance(event, Trace):
            return
        self.steps += 1
        if event.peak is not None and self._is_worse(event, event.peak):
            self._worst_is_first = self.worst is None
            self.worst = event

    def _is_worse(self, event: Trace, peak: int) -> bool:
        worst = self.worst
        if worst is None or event.exact != worst.exact:
            return worst is None or event.exact
        most = worst.peak or 0
        return peak > (most / WORSE if self._worst_is_first else most * WORSE)


def among(steps: int) -> str:
    """Of how many traced steps one is the worst, in words."""
    return "the only step that was traced" if steps == 1 else f"the worst of {steps:,} traced steps"
