"""Step numbers of trackers' runs, and step numbers that a trainer gives to its steps."""

from __future__ import annotations

from collections.abc import Callable

from memlog._internal.diagnostics import Diagnostics

MAX_NUMBER = 2**53
"""Largest step number that memlog accepts, because trackers and web pages store numbers as floats."""


class RunOffsets:
    """Offset of each tracker's run (`memlog.journal.Binding.offset`): the session's step minus the run's.

    A backend's first run has the session's step numbers. Each later run begins at step 0. If the trainer has
    its own step numbers, `begin_at` changes the offset. If the user returns to a run, the run keeps its
    offset.

    Args:
        opened_own: Function that takes a backend's name. It returns True if memlog has opened its own run in
            this backend. In this case, the user's first run also begins at step 0.
    """

    def __init__(self, opened_own: Callable[[str], bool]) -> None:
        self._opened_own = opened_own
        self._by_run: dict[tuple[str, str], int] = {}
        self._without_step: dict[str, str] = {}

    def joined(self, backend: str, run_id: str, next_step: int, *, is_first: bool) -> int:
        """Return the offset of a run that was joined before the session's step ``next_step``.

        ``is_first``: no other run of this backend was joined before.
        """
        known = self._by_run.get((backend, run_id))
        if known is not None:
            return known
        continues = is_first and not self._opened_own(backend)
        self._without_step[backend] = run_id
        offset = self._by_run[backend, run_id] = 0 if continues else next_step
        return offset

    def of(self, backend: str, run_id: str) -> int:
        """Return the offset of a run that was joined."""
        return self._by_run[backend, run_id]

    def begin_at(self, step: int, number: int | None) -> list[tuple[str, str, int]]:
        """If a backend's newest run has no step yet, let the run begin with the session's step ``step``.

        ``number`` is the trainer's number for the step; ``None``: there is none. The run uses the trainer's
        number for the step, too. Return backend, id and offset of each run whose offset has changed.
        """
        if not self._without_step:
            return []
        begin, self._without_step = self._without_step, {}
        changed = []
        for backend, run_id in begin.items():
            offset = self._by_run[backend, run_id]
            if number is not None and offset != step - number:
                self._by_run[backend, run_id] = step - number
                changed.append((backend, run_id, step - number))
        return changed


class TrainerNumbers:
    """Conversion of a trainer's own numbers to the session's steps, which only rise."""

    def __init__(self) -> None:
        self._shift = 0

    def step_of(self, number: int, next_step: int) -> int:
        """Return the session's step for a trainer's number.

        If the trainer's number jumps ahead, the session's step does, too. If the number goes back, the
        session's step is ``next_step``.
        """
        if number + self._shift < next_step:
            self._shift = next_step - number
        return number + self._shift

    def recorded(self, number: int, step: int) -> None:
        """Note that the trainer's step ``number`` is the session's step ``step``."""
        self._shift = step - number


def checked_number(number: object, diagnostics: Diagnostics) -> int | None:
    """Return a step's number as an integer; ``None`` if it is missing or invalid.

    ``diagnostics`` counts invalid numbers, and prints a warning about the first one.
    """
    if number is None:
        return None
    with diagnostics.contained("reading a step's number"):
        if not isinstance(number, bool) and hasattr(number, "__index__"):
            found = int(number.__index__())
            if 0 <= found <= MAX_NUMBER:
                return found
        diagnostics.drop(
            "step_number",
            f"{number!r:.100} is not a valid step number, so memlog uses its own count: pass a whole number, "
            "0 or more",
        )
    return None
