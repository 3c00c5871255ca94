"""Count a run's traced steps and find the worst of them, from the journal's events only."""

from __future__ import annotations

from memlog.events import Trace

WORSE = 1.01
"""Factor. A step replaces the worst step if the step's peak exceeds the worst peak times the factor. But if
the worst step is the first traced step, the limit is the worst peak divided by the factor."""


class TraceFold:
    """Number of traced steps, the worst of them, and the newest.

    The worst step is the one whose allocations the run's folder has (`Trace.kept`). If the journal does not
    tell that, it is the step with the highest peak. An exact peak takes precedence over a peak that is not
    exact. The first traced step can lack the optimizer's state. So a later step replaces the first traced
    step even if the later step's peak is slightly lower.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.worst: Trace | None = None
        self.newest: Trace | None = None
        self._worst_is_first = False

    def take(self, event: Trace) -> None:
        self.steps += 1
        self.newest = event
        if event.peak is not None and self._is_worse(event, event.peak):
            self._worst_is_first = self.worst is None
            self.worst = event

    def _is_worse(self, event: Trace, peak: int) -> bool:
        worst = self.worst
        if event.kept is not None:
            return event.kept or worst is None
        if worst is None or event.exact != worst.exact:
            return worst is None or event.exact
        most = worst.peak or 0
        return peak > (most / WORSE if self._worst_is_first else most * WORSE)


def among(steps: int) -> str:
    return "the only step that was traced" if steps == 1 else f"the worst of {steps:,} traced steps"
