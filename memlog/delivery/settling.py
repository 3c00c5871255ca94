"""The training process's wait until the helper process has settled a user's run that begins to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from memlog.delivery.helper.protocol import SETTLED
from memlog.events import End
from memlog.journal import RunDirectory

SETTLED_WITHIN = 1.0
"""Maximum seconds by which memlog delays the end of a user's run."""
_FOR_WRITING = 0.2
"""Seconds of `SETTLED_WITHIN` that are left to write the helper's results to the run."""
_POLL = 0.01


def settled_until() -> float:
    """Return when a run that begins to end now no longer waits for the helper, as `time.monotonic` does."""
    return time.monotonic() + SETTLED_WITHIN - _FOR_WRITING


class Settling:
    """The helper process's work for one `memlog.delivery.helper.protocol.Settle` message.

    ``has_no_helper`` returns True if no helper process runs that will do the work. ``end`` is how the user's
    run ends. ``until`` is the time of `settled_until` when the run began to end.
    """

    def __init__(
        self,
        run: RunDirectory,
        number: int,
        end: End,
        until: float,
        has_no_helper: Callable[[], bool],
    ) -> None:
        self.end = end
        self._until = until
        self._file = run.path / SETTLED
        self._number = number
        self._has_no_helper = has_no_helper

    def wait(self) -> None:
        """Wait until the helper is done, or can't be done in time."""
        while not (self._is_done() or self._has_no_helper() or time.monotonic() >= self._until):
            time.sleep(_POLL)

    def _is_done(self) -> bool:
        with suppress(OSError, ValueError):
            return int(self._file.read_text()) >= self._number
        return False
