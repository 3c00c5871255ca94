"""Retry policy for tracing a step."""

from __future__ import annotations

_LONGEST = 32
"""Maximum number of steps between two attempts."""


class RetryPolicy:
    """Request to trace a step, and the wait after attempts that failed.

    Attributes:
        awaits_compiler: True while tracing waits for ``torch.compile`` to finish.
    """

    def __init__(self) -> None:
        self.awaits_compiler = False
        self._wanted = False
        self._disabled = False
        self._failures = 0
        self._pause = 0

    def want(self) -> None:
        """Request a trace of the next step."""
        self._wanted = True
        self._disabled = False
        self._pause = 0

    def done(self) -> None:
        """Clear the request: a trace has started, or failed for good."""
        self._wanted = self.awaits_compiler = False
        self._failures = 0

    def postpone(self) -> None:
        """Try again later. Each further failure doubles the number of steps until then."""
        self._pause = min(2**self._failures, _LONGEST) - 1
        self._failures += 1

    def disable(self) -> None:
        """Stop trying until the next `want`."""
        self.done()
        self._disabled = True

    def next_step(self, *, allowed: bool) -> bool:
        """Return whether to try to trace the step that begins.

        ``allowed``: the budget allows a trace that was not requested.
        """
        if self._disabled:
            return False
        if self._pause:
            self._pause -= 1
            return False
        self._wanted = self._wanted or allowed
        return self._wanted
