"""How often the writer works: often enough for a row, seldom enough for the trainer."""

from __future__ import annotations

import time

SHARE = 0.05
"""Of one processor, in the long run; what the tracker's client does in its own threads comes on top."""
SHORTEST_PAUSE = 0.01
LONGEST_PAUSE = 60.0
"""Seconds between passes of the writer."""
_RESERVE = 0.05
"""Seconds of processor time that may be taken at once, saved up in quieter times: some passes take longer
than others, and the steps are not to wait for it that come after one of these."""


class Pace:
    """Says how long to wait, by what its passes have taken of the processor so far."""

    def __init__(self) -> None:
        self._left = _RESERVE
        self._at = time.monotonic()

    def pause(self, took: float) -> float:
        """Seconds to wait after a pass that took ``took`` seconds of processor time."""
        now = time.monotonic()
        self._left = min(_RESERVE, self._left + (now - self._at) * SHARE) - took
        self._at = now
        return min(max(SHORTEST_PAUSE, -self._left / SHARE), LONGEST_PAUSE)
