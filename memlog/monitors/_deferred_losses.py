"""Losses that a device is still computing when they are passed to memlog."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from memlog._internal import current_session, fork
from memlog.monitors._losses import LossReading, LossValue, Pending
from memlog.monitors._publishing import HEALTH

MAX_DEFERRED = 10_000
"""Maximum number of losses that wait for a device; further losses are dropped."""
_POLL_S = 0.002
"""Seconds between two checks for waiting losses."""


class DeferredLosses:
    """Thread that waits for losses that a device still computes. It starts at the first of these losses.

    A loss whose value is known is delivered at once if no earlier loss waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._generation = fork.generation
        self._waiting: queue.SimpleQueue[tuple[LossReading, Callable[[LossValue | None], None]]]
        self._waiting = queue.SimpleQueue()
        self._left = 0
        self._thread: threading.Thread | None = None

    def deliver(self, reading: LossReading, then: Callable[[LossValue | None], None]) -> None:
        """Call ``then`` with a loss's value, or with ``None`` if ``reading`` is ``None`` (there is no loss).

        If a device still computes this loss or an earlier loss, a background thread calls ``then`` later.
        The calls are made in the order of the losses.
        """
        if fork.generation != self._generation:
            self._begin()
        if not isinstance(reading, Pending) and not self._left:
            then(reading)
            return
        with self._lock:
            if self._left >= MAX_DEFERRED:
                HEALTH.drop(
                    "losses_waiting",
                    f"more than {MAX_DEFERRED:,} losses wait for a device: the newest are not recorded",
                )
                return
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memlog-losses", daemon=True)
                self._thread.start()
                current_session.before_finish(self.settle)
        self._waiting.put((reading, then))

    def settle(self, seconds: float) -> None:
        """Wait until every loss is delivered, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        if fork.generation != self._generation:
            return  # the waiting losses belong to the parent process
        while self._left and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _run(self) -> None:
        while True:
            reading, then = self._waiting.get()
            with HEALTH.contained("reading a loss from a device"):
                then(reading.wait() if isinstance(reading, Pending) else reading)
            with self._lock:
                self._left -= 1


DEFERRED_LOSSES = DeferredLosses()
"""The only instance in a process: all monitors share its thread."""
fork.renew(DEFERRED_LOSSES, "_lock", threading.Lock)
