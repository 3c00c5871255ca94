"""The training process as its helper process sees it: events, last message, and whether it lives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from memlog.delivery.helper import protocol
from memlog.delivery.helper.sampler import StepFollower
from memlog.events import Event
from memlog.journal import JournalFile, RunDirectory

_REPARENTED_WITHIN = 2.0
"""Maximum seconds to wait until the children of a dead process have another parent."""


class TrainingProcess:
    """The training process of a run.

    ``on_event`` is called with each event of the training process's journal, in order.

    Attributes:
        follower: Reads the training process's journal.
        finish: The training process's last message; ``None`` until it arrives.
    """

    def __init__(
        self, begin: protocol.Begin, run: RunDirectory, on_event: Callable[[Event], object]
    ) -> None:
        self._begin = begin
        self._run = run
        file = JournalFile(run.path, f"trainer-{begin.trainer_pid}")
        self.follower = StepFollower(file, on_event)
        self.finish: protocol.Finish | None = None

    @property
    def has_told_its_end(self) -> bool:
        """True if the training process has reported its end.

        A process with its own helper sends a message. A process that shares another rank's helper has no
        pipe to send a message. Such a process only writes its end to its journal.
        """
        return self.finish is not None or (self._begin.shared and self.follower.end is not None)

    @property
    def is_gone(self) -> bool:
        """True if the training process has died."""
        if self._begin.shared:
            return not self._run.is_alive()
        # If the parent dies, the child gets another parent. The training process's number alone
        # proves nothing, because another process can get the same number.
        return os.getppid() != self._begin.trainer_pid

    @property
    def goes_on(self) -> bool:
        """True if the training process still runs and has not reported its end."""
        return not self.is_gone and self.finish is None and self.follower.end is None

    def is_gone_soon(self) -> bool:
        """Wait at most `_REPARENTED_WITHIN` seconds; return whether the training process has died.

        The wait is necessary because `is_gone` checks the parent of this process. If the training
        process dies, its pipe closes before this process gets another parent.
        """
        deadline = time.monotonic() + _REPARENTED_WITHIN
        while not self.is_gone:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True
