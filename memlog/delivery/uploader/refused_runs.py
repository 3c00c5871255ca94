"""Runs of a tracker's that it refuses: deleted or gone. Only what is for them waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from memlog._internal.redact import without_credentials
from memlog.errors import RunRefusedError
from memlog.journal.delivery_state import UploadState

FIRST_REST = 5.0
"""Seconds until a run that was refused is asked for again, while its session goes on; doubled each time."""
LONGEST_REST = 600.0
_NAMED = 3
"""Refused runs that a message tells of; of others it tells how many there are."""
_OWN = ""


class Refusals:
    """What an uploader knows of the runs that its tracker refuses.

    Args:
        state: What the uploader remembers: says which runs are refused, and why.
        memlog_run: memlog's own id of the run, for the remedy.
        is_replaceable: Whether a run of the sink's own can take a target's place.
    """

    def __init__(
        self,
        state: UploadState,
        memlog_run: str,
        is_replaceable: Callable[[str | None], bool] = lambda _: False,
    ) -> None:
        self._state = state
        self._memlog_run = memlog_run
        self._is_replaceable = is_replaceable
        self._rests: dict[str, tuple[float, float]] = {}
        self._resting: set[str] = set()
        self._met = set(state.refused)
        self._is_final = False

    def begin(self, *, final: bool) -> None:
        """A round of deliveries begins: whoever has rested is asked for again, at the end everybody."""
        now = time.monotonic()
        if final and not self._is_final:
            self._rests.clear()
        self._is_final = final
        self._resting = {key for key, (until, _) in self._rests.items() if now < until}
        self._met = set()

    def end(self) -> None:
        """Forgets those for which nothing was left."""
        for key in self._state.refused.keys() - self._met:
            self._forget(key)

    def check(self, target: str | None) -> None:
        """Passes a target that may be asked for.

        Raises:
            RunRefusedError: it was refused a short while ago.
        """
        key = target or _OWN
        if key in self._resting:
            self._met.add(key)
            raise RunRefusedError(self._state.refused.get(key, "the run was refused"))

    def note(self, target: str | None, error: Exception) -> None:
        """A target was refused: it rests from now on."""
        key = target or _OWN
        self._met.add(key)
        if key in self._resting:
            return
        self._resting.add(key)
        _, rest = self._rests.get(key, (0.0, FIRST_REST / 2))
        rest = min(rest * 2, LONGEST_REST)
        self._rests[key] = time.monotonic() + rest, rest
        self._state.refused[key] = without_credentials(str(error))

    def lift(self, target: str | None) -> None:
        """A target was not refused."""
        self._forget(target or _OWN)

    @property
    def problem(self) -> str | None:
        """Which runs are refused, why, and what to do, in one line; ``None`` where none is."""
        reasons = list(self._state.refused.values())
        if not reasons:
            return None
        told = "; ".join(reasons[:_NAMED])
        if len(reasons) > _NAMED:
            told += f"; and {len(reasons) - _NAMED:,} more runs like these"
        sync = f"memlog sync {self._memlog_run}"
        back, own = ("it is", "a run") if len(reasons) == 1 else ("they are", "runs")
        told += f": nothing is lost, `{sync}` brings what is left once {back} back"
        if any(self._is_replaceable(key or None) for key in self._state.refused):
            told += f", `{sync} --own-run` brings it to {own} of memlog's own"
        return told

    def _forget(self, key: str) -> None:
        self._state.refused.pop(key, None)
        self._rests.pop(key, None)
        self._resting.discard(key)
