"""Whether it is time to try to trace a step."""

from __future__ import annotations

_LONGEST = 32
"""Steps between two attempts, at most."""


class RetryPolicy:
    """Remembers that a step is to be traced, and how often that could not be.

    Attributes:
        late: Whether it waits for the compiler.
    """

    def __init__(self) -> None:
        self.awaits_compiler = False
        self._wanted = False
        self._disabled = False
        self._failures = 0
        self._pause = 0

    def want(self) -> None:
        """A step is to be traced, at once."""
        self._wanted = True
        self._disabled = False
        self._pause = 0

    def done(self) -> None:
        """One is, or no more can be done about it."""
        self._wanted = self.awaits_compiler = False
        self._failures = 0

    def postpone(self) -> None:
        """It could not be now: later, ever more steps later."""
        self._pause = min(2**self._failures, _LONGEST) - 1
        self._failures = min(self._failures + 1, _LONGEST)

    def disable(self) -> None:
        """It can't be at all, unless somebody asks again."""
        self.done()
        self._disabled = True

    def next_step(self, *, allowed: bool) -> bool:
        """Whether to try it in the step that begins.

        Args:
            allowed: Whether the budget has room for one that nobody has asked for.
        """
        if self._disabled:
            return False
        if self._pause:
            self._pause -= 1
            return False
        self._wanted = self._wanted or allowed
        return self._wanted
