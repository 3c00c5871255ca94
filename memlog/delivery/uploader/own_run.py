"""memlog's own run in a tracker. After a restart, the training continues the same run."""

from __future__ import annotations

from functools import cached_property

from memlog.delivery.uploader.outbox import OWN
from memlog.errors import TrackerUnavailableError
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import HelperLock, UploadState
from memlog.ranks.registration import registration_of
from memlog.ranks.restarts import steps_ahead


class OwnRun:
    """memlog's own run in one tracker, for one session.

    Attributes:
        continues: memlog's id of the training's first session, which opened the run; ``None``: the training
            was not restarted.
    """

    def __init__(self, run: RunDirectory, state: UploadState) -> None:
        self._run = run
        self._state = state
        known = registration_of(run)
        self._before = None if known is None else known.before
        self.continues = None if self._before is None else self._before.first

    @cached_property
    def offset(self) -> int:
        """Number of a step in this session, minus the number of the same step in the tracker's run."""
        return -steps_ahead(self._run)

    def may_begin(self, *, is_allowed: bool, is_final: bool) -> bool:
        """Return whether the uploader can send events to memlog's own run now.

        Args:
            is_allowed: True if the uploader may open memlog's own run; False while the user might still
                open a run.
            is_final: True if the journal is complete.

        Raises:
            TrackerUnavailableError: The journal is complete, but another process still sends the data of the
                session before the restart.
        """
        if self._state.own_run is not None:
            return True
        if is_allowed and self._before is not None and not self._has_taken_over(self._before.run):
            if is_final:
                raise TrackerUnavailableError(
                    "the attempt before the restart is still being delivered to the same run"
                )
            return False
        return is_allowed

    def _has_taken_over(self, run_id: str) -> bool:
        """Take over the run and the alerts of the session before the restart.

        Take over nothing, and return False, if another process still sends that session's data.
        """
        before = RunDirectory(self._run.path.parent / run_id)
        if not before.path.exists():
            return True
        with HelperLock(before) as is_free:
            if is_free:
                known = UploadState.load(before, self._state.backend)
                known.continued_by = self._run.id
                known.save(before)
                self._state.own_run = known.own_run
                if OWN in known.outbox.alerts:
                    # A tracker may show all alerts of a run as one file.
                    self._state.outbox.alerts[OWN] = known.outbox.alerts[OWN]
            return is_free
