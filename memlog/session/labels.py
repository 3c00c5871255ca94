"""Labels of blocks, points and phases: without secrets, and limited in number."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import without_credentials
from memlog.events import Phase, Recorded, Scope

MAX_METRIC_LABELS = 50
"""Maximum number of labels of blocks, points and phases that get metrics of their own."""


shown_label = lru_cache(maxsize=256)(without_credentials)
"""Label without secrets. A program has few labels and uses them often."""


class Labels:
    """Labels of blocks, points and phases. The first `MAX_METRIC_LABELS` labels get metrics of their own."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._known: set[str] = set()

    def with_step(
        self, event: Scope | Recorded | Phase, step: int | None
    ) -> Scope | Recorded | Phase:
        """Return the event without secrets in its label, and with the step if trackers get metrics for it.

        They get metrics for the first `MAX_METRIC_LABELS` labels, and none for an event without a step.
        """
        event = msgspec.structs.replace(event, label=shown_label(event.label))
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
