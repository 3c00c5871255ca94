"""Choice of the one `EpochMemoryMonitor` that counts a session's steps and epochs, if there are several."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

from memlog._internal.current_session import Publisher

IDLE_EPOCHS = 2
"""Number of epochs that a second monitor must end before it replaces the counting monitor. Meanwhile, the
counting monitor must end no batch and no epoch. One epoch is not enough, because a validation between two
training epochs is an epoch, too."""


class EpochOwner:
    """Number of the session's next epoch, and the monitor that counts the session's steps and epochs."""

    def __init__(self) -> None:
        self._session: weakref.ref[Publisher] | None = None
        self._begin()

    def _begin(self) -> None:
        self._owner: weakref.ref[object] | None = None
        self._epochs: Iterator[int] = itertools.count()
        self._other: weakref.ref[object] | None = None
        self._epochs_of_other = 0

    def counts(self, monitor: object, session: Publisher) -> bool:
        """Return True if a batch or an epoch of ``monitor`` counts for the session.

        The first monitor that calls this method counts. If the counting monitor is deleted, the next caller
        counts. If the counting monitor is idle, a monitor that has ended `IDLE_EPOCHS` epochs counts.
        """
        if self._session is None or self._session() is not session:
            self._begin()  # epochs of another run begin at 0
            self._session = weakref.ref(session)
        owner = None if self._owner is None else self._owner()
        if owner is None or (self._is_other(monitor) and self._epochs_of_other >= IDLE_EPOCHS):
            self._owner, owner = weakref.ref(monitor), monitor
        if owner is monitor:
            self._other, self._epochs_of_other = None, 0
        return owner is monitor

    def other_epoch(self, monitor: object) -> None:
        """Record an ended epoch of a monitor whose epochs do not count for the session."""
        if not self._is_other(monitor):
            self._other, self._epochs_of_other = weakref.ref(monitor), 0
        self._epochs_of_other += 1

    def next_epoch(self) -> int:
        """Count the epoch that has just ended. Return its number in the session, from 0."""
        return next(self._epochs)

    def _is_other(self, monitor: object) -> bool:
        return self._other is not None and self._other() is monitor


EPOCH_OWNER = EpochOwner()
"""The only instance in a process, because a process has one session at a time."""
