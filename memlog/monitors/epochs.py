"""Monitor of batches and epochs, for callbacks of a training loop."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from memlog._internal.current_session import Publisher
from memlog.console import announcement, batch_line, epoch_line, optimization_line
from memlog.events import Batch, Epoch, Loss, now_us
from memlog.monitors import _publishing
from memlog.monitors._losses import DEFERRED_LOSSES, LossValue, read
from memlog.monitors._publishing import MemoryReader


class EpochMemoryMonitor:
    """Monitor for a training loop: call it at an epoch's start, after each batch, and at the epoch's end.

    Each call of `on_batch_end` counts as a step. memlog no longer counts optimizer steps. If there are
    several monitors, for example for training and validation, only the first monitor that ends a batch or an
    epoch counts. The other monitors only print lines. If the counting monitor is deleted, another monitor
    counts instead. The same happens if another monitor ends two epochs while the counting monitor is idle.

    Args:
        enabled: ``False``: calls do nothing.
        verbose_batches: Number of batches at the start of each epoch for which a line is printed.
        device: Accelerator whose figures are read, by number or by torch's name, such as ``cuda:1``.
    """

    def __init__(self, enabled: bool = True, verbose_batches: int = 5, device: Any = 0) -> None:
        self.enabled = enabled
        self.verbose_batches = verbose_batches
        if enabled:
            self._reader = MemoryReader(device)
            self._printed = 0
            self._step: int | None = None
            self._claimed: Publisher | None = None
            with _publishing.HEALTH.contained("beginning to monitor"):
                self._announce()

    def on_epoch_start(self) -> None:
        """Begin an epoch or a black-box optimisation."""
        if self.enabled:
            with _publishing.HEALTH.contained("beginning an epoch"):
                self._claim()
                self._printed = 0
                self._reader.epoch(0, None)  # excludes earlier peaks from this epoch

    def on_batch_start(self, batch_idx: int) -> None:
        """Do nothing: memory is read at the batch's end."""

    def on_batch_end(self, batch_idx: int, loss: Any = None) -> None:
        """End a batch. Call it after the optimizer's step.

        Args:
            batch_idx: The batch's number within the epoch, for the printed line.
            loss: A number, a tensor or any other loss that `watch_loss` accepts; ``None``: no loss. memlog
                does not wait for a loss on a device. memlog publishes the loss as soon as its value is known.
        """
        if not self.enabled or _publishing.silenced():
            return
        with _publishing.HEALTH.contained("ending a batch"):
            self._batch(batch_idx, loss)

    def on_epoch_end(self) -> None:
        """End an epoch: publish and print its peaks."""
        self._end("ending an epoch", epoch_line)

    def on_optimization_end(self) -> None:
        """End a black-box optimisation, as `on_epoch_end` ends an epoch, but print a different line."""
        self._end("ending an optimisation", optimization_line)

    def _announce(self) -> None:
        session = self._claim()
        if session is None or not session.announced:
            _publishing.print_notice(announcement, self.verbose_batches)

    def _claim(self) -> Publisher | None:
        """Return the running session. At the first call for a session, ask to count the session's steps."""
        session = _publishing.session()
        if session is not None and session is not self._claimed:
            session.claim_steps(only_first=True)
            self._claimed = session
        return session

    def _batch(self, index: int, loss: Any) -> None:
        session = self._claim()
        counts = session is not None and EPOCH_OWNER.counts(self, session)
        counted = session.count_step() if session is not None and counts else None
        self._step, event = counted if counted is not None else (None, None)
        shown = self._printed < self.verbose_batches
        self._printed += 1
        reading = read(loss)
        if event is None and not shown:
            return
        line = self._line_of(index) if shown else None
        step = event.step if event is not None else None

        def when_known(value: LossValue | None) -> None:
            if value is not None and step is not None and session is not None:
                session.publish(Loss(now_us(), step, value.value))
            if line is not None:
                text = None if value is None else value.text
                _publishing.print_notice(batch_line, index, line, text)

        DEFERRED_LOSSES.deliver(reading, when_known)

    def _line_of(self, index: int) -> Batch:
        point = self._reader.point("")
        return Batch(point.time_us, index, point.rss, None, None, point.devices)

    def _end(self, doing: str, line: Callable[[Epoch], str]) -> None:
        if self.enabled and not _publishing.silenced():
            with _publishing.HEALTH.contained(doing):
                event = self._publish_epoch()
                DEFERRED_LOSSES.deliver(None, lambda _: _publishing.print_notice(line, event))

    def _publish_epoch(self) -> Epoch:
        session = self._claim()
        if session is None:
            return self._reader.epoch(0, None)
        if not EPOCH_OWNER.counts(self, session):
            EPOCH_OWNER.other_epoch(self)
            return self._reader.epoch(0, None)
        event = self._reader.epoch(EPOCH_OWNER.next_epoch(), self._step)
        session.publish(event)
        return event


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
