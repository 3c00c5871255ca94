"""Save an uploader's state. Data that a sink has taken but not stored safely counts as not delivered."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memlog._internal.redact import without_credentials
from memlog.delivery.uploader.open_runs import OpenRuns
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import UploadState


class SavedProgress:
    """An uploader's state, and a copy of the last state in which all delivered data was stored safely.

    Attributes:
        failures: Number of failed deliveries since the last successful delivery.
    """

    def __init__(self, run: RunDirectory, state: UploadState, open_runs: OpenRuns) -> None:
        self._run = run
        self._state = state
        self._open_runs = open_runs
        self.failures = 0
        # If an earlier uploader did not close its sink, its provisional points are sent again.
        state.provisional = 0
        self.mark_safe()

    def mark_safe(self) -> None:
        """Keep a copy of the present state as the last safe one."""
        self._safe = msgspec.convert(msgspec.to_builtins(self._state), UploadState)

    def go_back(self) -> None:
        """Return to the last safe state, and drop the open sinks. Data sent since then is sent again."""
        safe = self._safe
        self._state.files, self._state.outbox = dict(safe.files), safe.outbox
        self._state.delivered, self._state.dropped = safe.delivered, dict(safe.dropped)
        self._state.deferred = dict(safe.deferred)
        self.mark_safe()
        self._open_runs.forget()

    def save(self) -> None:
        """Save the state. If an open sink can still lose data, the saved progress is the last safe one."""
        safe, state = self._safe, self._state
        if not self._open_runs.are_durable:
            state = msgspec.structs.replace(
                state,
                files=safe.files,
                outbox=safe.outbox,
                delivered=safe.delivered,
                dropped=safe.dropped,
                deferred=safe.deferred,
                provisional=state.delivered - safe.delivered,
            )
        state.save(self._run)

    def count(self, lost: Mapping[str, int]) -> None:
        """Add counts of lost data, by reason."""
        for reason, count in lost.items():
            self._state.dropped[reason] = self._state.dropped.get(reason, 0) + count

    def count_and_save(self, lost: Mapping[str, int]) -> None:
        """Save that alerts or a file were sent. ``lost`` counts the lost items, by reason."""
        self.count(lost)
        self.save()

    def note_failure(self, error: Exception) -> None:
        """Save that a delivery failed, and the reason."""
        self.failures += 1
        self._state.failed_attempts += 1
        self._state.stage = "unreachable"
        self._state.problem = without_credentials(str(error) or type(error).__name__)
        self.save()

    def note_refusals(self, *, complete: bool) -> None:
        """Save the message about runs that the tracker refuses. Call it when all other data is delivered."""
        state, refused_runs = self._state, self._open_runs.refused_runs
        before = state.stage, state.problem
        refused_runs.end()
        if refused_runs.problem and (complete or state.stage == "unreachable"):
            state.stage = "waiting"
        if state.stage != "unreachable":
            state.problem = refused_runs.problem
        if (state.stage, state.problem) != before:
            self.save()
