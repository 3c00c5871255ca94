"""Runs that the tracker refuses because they are deleted or missing. Data for other runs does not wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from memlog._internal.redact import without_credentials
from memlog.delivery.uploader.outbox import OWN
from memlog.errors import RunRefusedError
from memlog.journal.delivery_state import UploadState

RETRY_INTERVAL = 30.0
"""Minimum seconds between two attempts to deliver to refused runs, while the session goes on."""
_NAMED = 3
"""Maximum number of refused runs whose reasons a message lists. The message only counts the others."""


class RefusedRuns:
    """Runs that the tracker of one uploader refuses. The uploader's state has the runs and the reasons.

    ``sync`` is the command that delivers the remaining data. The message (`problem`) contains this command.
    ``is_replaceable`` returns whether the sink can open a run of its own to replace a refused run.
    """

    def __init__(
        self,
        state: UploadState,
        sync: str,
        is_replaceable: Callable[[str | None], bool],
    ) -> None:
        self._state = state
        self._sync = sync
        self._is_replaceable = is_replaceable
        self._blocked: set[str] = set()
        self._retry_at = 0.0
        self._needed = set(state.refused)
        self._is_final = False

    def begin(self, *, final: bool) -> None:
        """Begin a pass over the journal.

        ``final`` is True if the journal is complete. The first such pass tries all refused runs again.
        """
        now = time.monotonic()
        if now >= self._retry_at or (final and not self._is_final):
            self._blocked.clear()
            self._retry_at = now + RETRY_INTERVAL
        self._is_final = final
        self._needed = set()

    def end(self) -> None:
        """End a pass over the journal. Forget the refused runs for which the pass found no data."""
        for key in self._state.refused.keys() - self._needed:
            self.lift(key)

    def check(self, target: str | None) -> None:
        """Raise ``RunRefusedError`` if the tracker has refused a target's run and no retry is due."""
        key = target or OWN
        if key in self._blocked:
            self._needed.add(key)
            raise RunRefusedError(self._state.refused.get(key, "the run was refused"))

    def note(self, target: str | None, error: Exception) -> None:
        """Block a refused target until the next retry. Store the error's text."""
        key = target or OWN
        self._needed.add(key)
        if key not in self._blocked:
            self._blocked.add(key)
            self._state.refused[key] = without_credentials(str(error))

    def lift(self, target: str | None) -> None:
        """Unblock a target, because the tracker accepts it, or because no data waits for it."""
        key = target or OWN
        self._state.refused.pop(key, None)
        self._blocked.discard(key)

    @property
    def problem(self) -> str | None:
        """Message with the reasons, and the command that delivers the data; ``None`` if no run is refused."""
        reasons = list(self._state.refused.values())
        if not reasons:
            return None
        message = "; ".join(reasons[:_NAMED])
        if len(reasons) > _NAMED:
            message += f"; and {len(reasons) - _NAMED:,} more runs like these"
        exist, own = ("it exists", "a run") if len(reasons) == 1 else ("they exist", "runs")
        message += f": nothing is lost, `{self._sync}` delivers the rest once {exist} again"
        if any(self._is_replaceable(key or None) for key in self._state.refused):
            message += f", or `{self._sync} --own-run` delivers it to {own} of memlog's own"
        return message
