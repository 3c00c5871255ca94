"""Retry policy for tracing a step, and the count of steps that were not traced."""

from __future__ import annotations

from memlog._internal.diagnostics import Diagnostics

SKIPPED = "trace_skipped"
"""Name under which skipped traces are counted."""
_LONGEST = 32
"""Maximum number of steps between two attempts to trace a step."""


class RetryPolicy:
    """Request to trace a step, and the number of steps to wait after a failed attempt.

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
        """Clear the request. Call this when a trace has started, or failed for good."""
        self._wanted = self.awaits_compiler = False
        self._failures = 0

    def postpone(self) -> None:
        """Let some steps pass before the next attempt. Each further failure doubles the number of steps."""
        self._pause = min(2**self._failures, _LONGEST) - 1
        self._failures += 1

    def disable(self) -> None:
        """Stop tracing steps until the next call of `want`."""
        self.done()
        self._disabled = True

    def next_step(self, *, allowed: bool) -> bool:
        """Return whether to try to trace the step that begins.

        ``allowed``: True if the step may be traced without a request.
        """
        if self._disabled:
            return False
        if self._pause:
            self._pause -= 1
            return False
        self._wanted = self._wanted or allowed
        return self._wanted


def count_skipped(diagnostics: Diagnostics, why: str, *, for_good: bool = False) -> None:
    """Count a step that could not be traced. Log the reason the first time.

    ``for_good``: True if tracing stops, so that no further step will be traced.
    """
    first = f"a step could not be traced ({why}); memlog counts how often that happens"
    diagnostics.drop(SKIPPED, f"no step is traced from now on: {why}" if for_good else first)
