"""Limit on the in-process writer's share of a processor, which it takes from the trainer."""

from __future__ import annotations

import time

SHARE = 0.05
"""Share of one processor in the long run, without the work of the tracker's client in its own threads."""
SHORTEST_PAUSE = 0.01
LONGEST_PAUSE = 60.0
"""Seconds between passes of the writer, at least and at most."""
_RESERVE = 0.05
"""Processor seconds that may be used at once, saved in quieter times: after one long pass the next ones come
on time all the same."""


class Pace:
    """Computes the pause after each pass from the processor time that passes have taken so far."""

    def __init__(self) -> None:
        self._left = _RESERVE
        self._at = time.monotonic()

    def pause(self, took: float) -> float:
        """Return the seconds to wait after a pass that took ``took`` seconds of processor time."""
        now = time.monotonic()
        self._left = min(_RESERVE, self._left + (now - self._at) * SHARE) - took
        self._at = now
        return min(max(SHORTEST_PAUSE, -self._left / SHARE), LONGEST_PAUSE)
