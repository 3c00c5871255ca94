"""Step numbers of trackers' runs, and step numbers that a trainer gives to its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from memlog._internal.diagnostics import Diagnostics

MAX_NUMBER = 2**53
"""Largest step number that memlog accepts, because trackers and web pages store numbers as floats."""


class RunOffsets:
    """Offset of each tracker's run (`memlog.journal.Binding.offset`): the session's step minus the run's.

    A backend's first run has the session's step numbers. Each later run begins at step 0. A run that an
    earlier session wrote to goes on after its last step, unless the user has passed ``initial_step``. If the
    trainer has its own step numbers, `begin_at` changes the offset. If nothing is known of a run's earlier
    steps, `number_first_row` takes the user's own number. If the user returns to a run, the run keeps its
    offset.

    Args:
        opened_own: Function that takes a backend's name. It returns True if memlog has opened its own run in
            this backend. In this case, the user's first run also begins at step 0.
        initial_step: The session's first step.
    """

    _reached: ClassVar[dict[tuple[str, str], int]] = {}
    """Last step of each run that an earlier session of this process wrote to, by backend and id."""

    def __init__(self, opened_own: Callable[[str], bool], initial_step: int) -> None:
        self._opened_own = opened_own
        self._initial_step = initial_step
        self._by_run: dict[tuple[str, str], int] = {}
        self._without_step: dict[str, str] = {}
        self._unsure: set[tuple[str, str]] = set()
        """Runs that begin at step 0 because nothing else is known."""
        self._next: dict[tuple[str, str], int] = {}
        """Next step of each run whose thread does not lead (`memlog.autolog.optimizer_steps`)."""
        self._left: dict[tuple[str, str], int] = {}
        """The session's next step when the events of each run ended, because another run was joined."""

    def joined(
        self, backend: str, run_id: str, next_step: int, last_step: int | None, *, is_first: bool
    ) -> int:
        """Return the offset of a run that was joined before the session's step ``next_step``.

        ``last_step`` is the last step that the run has from an earlier process; ``None``: it has none, or the
        step is unknown. ``is_first``: no other run of this backend was joined before.
        """
        key = backend, run_id
        if key in self._next:
            self._by_run[key] = next_step - self._next.pop(key)
        known = self._by_run.get(key)
        if known is not None:
            return known
        continues = is_first and not self._opened_own(backend)
        self._without_step[backend] = run_id
        begin = self._initial_step if continues else next_step
        last_steps = (last_step, self._reached.get((backend, run_id)))
        numbers = [step + 1 for step in last_steps if step is not None]
        if not numbers and not (continues and self._initial_step):
            self._unsure.add((backend, run_id))
        elif continues and self._initial_step:
            begin, numbers = 0, []  # the run has the session's step numbers
        offset = self._by_run[backend, run_id] = begin - max(numbers, default=0)
        return offset

    def number_first_row(
        self, backend: str, run_id: str, number: int | None, step: int | None
    ) -> int | None:
        """Take the user's number of a run's first row, if it is the number of the run's first step, too.

        Return the amount by which the run's steps rise; ``None``: memlog can't know the step at which the run
        begins.

        Args:
            backend: The run's backend.
            run_id: The run's id.
            number: The user's number; ``None``: the user gave none.
            step: The run's last completed step; ``None``: there is none yet.
        """
        if (backend, run_id) not in self._unsure:
            return 0
        self._unsure.discard((backend, run_id))
        # After several steps, the user's numbers may count something else, such as epochs or samples.
        if number is None or (step and number > step):
            return None
        rise = 0 if step else number
        self._by_run[backend, run_id] -= rise
        return rise

    def end(self, backend: str, run_id: str, last_step: int) -> None:
        """Keep the session's last step in a run, for a later session of this process."""
        self._reached[backend, run_id] = last_step - self._by_run[backend, run_id]

    def leave(self, backend: str, run_id: str, next_step: int) -> None:
        """Note that events from ``next_step`` on belong to another run of the backend."""
        self._left[backend, run_id] = next_step

    def step_beside(
        self, backend: str, run_id: str, next_step: int, last_step: Callable[[], int | None]
    ) -> int:
        """Count a step of a run whose thread does not lead, and return its number in the run.

        The arguments are those of `joined`.
        """
        key = backend, run_id
        if key not in self._next:
            known = self._by_run.get(key)
            if known is None:
                last = last_step()
                self._next[key] = 0 if last is None else last + 1
            else:
                self._next[key] = self._left.get(key, next_step) - known
        self._next[key] += 1
        return self._next[key] - 1

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
            if number is not None:
                self._unsure.discard((backend, run_id))
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
