"""The count of steps of each tracker's run, and the numbers that a trainer gives its steps."""

from __future__ import annotations

from collections.abc import Callable

from memlog._internal.diagnostics import Diagnostics

MAX_NUMBER = 2**53
"""Largest number of a step that memlog takes: trackers and pages store numbers as floats."""


class RunOffsets:
    """Offsets of the tracker's runs, `memlog.journal.Binding.offset`: the session's step minus the run's.

    The first run of a backend counts as the session does, since it also gets the data recorded before it.
    Each later run begins at 0. A run to which the user returns keeps its count.

    Args:
        opened_own: Returns, by a backend's name, whether memlog has opened a run of its own there. That run
            then has everything that was recorded so far.
    """

    def __init__(self, opened_own: Callable[[str], bool]) -> None:
        self._opened_own = opened_own
        self._by_run: dict[tuple[str, str], int] = {}
        self._without_step: dict[str, str] = {}

    def joined(self, backend: str, run_id: str, next_step: int, *, is_first: bool) -> int:
        """Return the offset of a run that was joined before the session's step ``next_step``."""
        known = self._by_run.get((backend, run_id))
        if known is not None:
            return known
        continues = is_first and not self._opened_own(backend)
        self._without_step[backend] = run_id
        offset = self._by_run[backend, run_id] = 0 if continues else next_step
        return offset

    def begin_at(self, step: int, number: int | None) -> list[tuple[str, str, int]]:
        """Note a step of the session: the runs without a step so far begin with it.

        Args:
            step: The session's step.
            number: The number that the trainer gave the step; these runs use it, too. ``None``: the trainer
                gave none.

        Returns:
            The runs whose offset has changed: backend, run and offset.
        """
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

        If the number jumps ahead, the step does, too. If it goes back, the step is the next one.
        """
        if number + self._shift < next_step:
            self._shift = next_step - number
        return number + self._shift

    def recorded(self, number: int, step: int) -> None:
        """Note that a step was recorded before its number was known."""
        self._shift = step - number


def checked_number(number: object, diagnostics: Diagnostics) -> int | None:
    """Return a step's number as an integer; ``None`` for no number or an invalid one, which is counted."""
    if number is None:
        return None
    with diagnostics.contained("reading a step's number"):
        if not isinstance(number, bool) and hasattr(number, "__index__"):
            found = int(number.__index__())
            if 0 <= found <= MAX_NUMBER:
                return found
        diagnostics.drop(
            "step_number",
            f"step {number!r:.100} is no step's number, so memlog counts on: pass a whole number from 0",
        )
    return None
