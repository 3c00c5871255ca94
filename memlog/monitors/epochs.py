"""A training loop's callbacks: batches and epochs."""

from __future__ import annotations

from typing import Any

from memlog._internal.current_session import Publisher
from memlog.console import Announcement, BatchNotice, OptimizationNotice
from memlog.events import Batch, Epoch, Loss, now_us
from memlog.monitors import _publishing
from memlog.monitors._deferred_losses import LATE
from memlog.monitors._epoch_owner import AXES
from memlog.monitors._losses import Value, read
from memlog.monitors._readings import Meter


class EpochMemoryMonitor:
    """Three calls in a training loop: batches are counted, epochs are closed with their peaks.

    It claims the step axis: its `on_batch_end` makes the batch events, and optimizer steps are no longer
    noticed, so nothing is counted twice. Of several monitors (training, validation) the first that ends a
    batch or an epoch counts; the others print, and publish nothing. Another one counts once the first is gone
    (deleted), or has had no batch during two epochs of the other.

    Args:
        enabled: ``False``: every call is next to free, and nothing is claimed.
        verbose_batches: For how many batches of each epoch a line is printed.
        device: Whose accelerator figures are printed.
    """

    def __init__(self, enabled: bool = True, verbose_batches: int = 5, device: Any = 0) -> None:
        self.enabled = enabled
        self.verbose_batches = verbose_batches
        if enabled:
            self._meter = Meter(device)
            self._printed = 0
            self._step: int | None = None
            self._claimed: Publisher | None = None
            with _publishing.HEALTH.contained("beginning to monitor"):
                self._announce()

    def on_epoch_start(self) -> None:
        """An epoch begins, or a black-box optimisation."""
        if self.enabled:
            with _publishing.HEALTH.contained("beginning an epoch"):
                self._claim()
                self._printed = 0
                self._meter.epoch(0, None)  # ends the windows of what was before

    def on_batch_start(self, batch_idx: int) -> None:
        """A batch begins: nothing is read here."""

    def on_batch_end(self, batch_idx: int, loss: Any = None) -> None:
        """A batch is over; call it after the optimizer's step.

        Args:
            batch_idx: Its number within the epoch, as printed.
            loss: A number, a tensor or whatever else `watch_loss` understands. One that is on a device
                is not waited for: it follows when it is known.
        """
        if not self.enabled or _publishing.silenced():
            return
        with _publishing.HEALTH.contained("ending a batch"):
            self._batch(batch_idx, loss)

    def on_epoch_end(self) -> None:
        """An epoch is over: publishes and prints its peaks."""
        if self.enabled and not _publishing.silenced():
            with _publishing.HEALTH.contained("ending an epoch"):
                event = self._end()
                LATE.deliver(None, lambda _: _publishing.tell(event))

    def on_optimization_end(self) -> None:
        """A black-box optimisation is over: like `on_epoch_end`, in that line's words."""
        if self.enabled and not _publishing.silenced():
            with _publishing.HEALTH.contained("ending an optimisation"):
                event = self._end()
                LATE.deliver(None, lambda _: _publishing.tell(OptimizationNotice(event)))

    def _announce(self) -> None:
        session = self._claim()
        if session is None or not session.announced:
            _publishing.tell(Announcement(self.verbose_batches))

    def _claim(self) -> Publisher | None:
        """Claims the steps of the running session, once."""
        session = _publishing.session()
        if session is not None and session is not self._claimed:
            session.claim_steps()
            self._claimed = session
        return session

    def _batch(self, index: int, loss: Any) -> None:
        session = self._claim()
        counts = session is not None and AXES.counts(self, session)
        counted = session.count_step() if session is not None and counts else None
        self._step, event = counted if counted is not None else (None, None)
        shown = self._printed < self.verbose_batches
        self._printed += 1
        reading = read(loss)
        if event is None and not shown:
            return
        line = self._line_of(index) if shown else None
        step = event.step if event is not None else None

        def when_known(value: Value | None) -> None:
            if value is not None and step is not None and session is not None:
                session.publish(Loss(now_us(), step, value.value))
            if line is not None:
                _publishing.tell(BatchNotice(index, line, None if value is None else value.text))

        LATE.deliver(reading, when_known)

    def _line_of(self, index: int) -> Batch:
        """This monitor's own device at this moment: what is printed."""
        point = self._meter.point("")
        return Batch(point.time_us, index, point.rss, None, None, point.devices)

    def _end(self) -> Epoch:
        session = self._claim()
        if session is None:
            return self._meter.epoch(0, None)
        if not AXES.counts(self, session):
            AXES.other_epoch(self)
            return self._meter.epoch(0, None)
        event = self._meter.epoch(AXES.next_epoch(), self._step)
        session.publish(event)
        return event
