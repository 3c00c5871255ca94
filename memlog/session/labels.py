"""Limit on the labels that get metrics."""

from __future__ import annotations

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Phase, Recorded, Scope

MAX_METRIC_LABELS = 50
"""Maximum number of labels of blocks, points and phases that get metrics of their own."""


class Labels:
    """Labels of blocks, points and phases. The first `MAX_METRIC_LABELS` labels get metrics of their own."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._known: set[str] = set()

    def with_step(
        self, event: Scope | Recorded | Phase, step: int | None
    ) -> Scope | Recorded | Phase:
        """Return the event with the step if the event's label is one of the first `MAX_METRIC_LABELS`.

        Return other events unchanged: trackers get no metrics for an event without a step.
        """
        if event.label not in self._known:
            if len(self._known) >= MAX_METRIC_LABELS:
                self._diagnostics.drop(
                    "labels",
                    f"blocks, points and phases have more than {MAX_METRIC_LABELS} labels: trackers get "
                    f"metrics of only the first {MAX_METRIC_LABELS}, the journal has all; use fewer labels",
                )
                return event
            self._known.add(event.label)
        return msgspec.structs.replace(event, step=step)
