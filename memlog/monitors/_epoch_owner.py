r"""Who of several `EpochMemoryMonitor`\ s counts a session's steps and epochs: one at a time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

from memlog._internal.current_session import Publisher

SILENT_EPOCHS = 2
"""Epochs of another monitor, with none of the counting one's batches between them, after which the other one
counts: training goes on with it. A validation between two epochs of training is one."""


class Axes:
    """The steps and the epochs of the running session, and the monitor that counts them."""

    def __init__(self) -> None:
        self._session: weakref.ref[Publisher] | None = None
        self._begin()

    def _begin(self) -> None:
        self._owner: weakref.ref[object] | None = None
        self._epochs: Iterator[int] = itertools.count()
        self._other: weakref.ref[object] | None = None
        self._epochs_of_other = 0

    def counts(self, monitor: object, session: Publisher) -> bool:
        """Whether a batch that is over now, or an epoch, is one of the session's.

        The first monitor that asks counts, until it is gone or silent.
        """
        if self._session is None or self._session() is not session:
            self._begin()  # another run begins at 0
            self._session = weakref.ref(session)
        owner = None if self._owner is None else self._owner()
        if owner is None or (self._is_other(monitor) and self._epochs_of_other >= SILENT_EPOCHS):
            self._owner, owner = weakref.ref(monitor), monitor
        if owner is monitor:
            self._other, self._epochs_of_other = None, 0
        return owner is monitor

    def other_epoch(self, monitor: object) -> None:
        """A monitor that does not count has ended an epoch."""
        if not self._is_other(monitor):
            self._other, self._epochs_of_other = weakref.ref(monitor), 0
        self._epochs_of_other += 1

    def next_epoch(self) -> int:
        """The number of the session's epoch that is over now."""
        return next(self._epochs)

    def _is_other(self, monitor: object) -> bool:
        return self._other is not None and self._other() is monitor


AXES = Axes()
"""The process's one: there is one session at a time."""
