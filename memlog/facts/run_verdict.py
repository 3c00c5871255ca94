"""Verdict on a run. The training process prints it, so this module imports nothing of the judging."""

from __future__ import annotations

from typing import Literal

import msgspec

from memlog.events import Finding


class RunVerdict(msgspec.Struct, frozen=True):
    """Verdict on a run's memory. Each surface that shows the run renders ``text`` as it is."""

    outcome: Literal["finding", "steady", "unsure", "too few steps"]
    text: str
    """One or two sentences. If the run ended badly, the end comes first."""
    rises: bool = False
    """True if memory rose, and nothing was found."""
    finding: Finding | None = None
    """Finding that the text tells."""
    parts: tuple[str, ...] = ()
    """Titles of findings about further causes of the same growth."""

    @property
    def growth(self) -> str | None:
        """The text, if it tells that memory grew or rose."""
        grew = self.rises or (self.finding is not None and self.finding.rate is not None)
        return self.text if grew else None
