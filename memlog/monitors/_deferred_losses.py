"""What becomes known later than it happened: losses that a device is still computing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from memlog._internal import current_session, fork
from memlog.monitors._losses import Pending, Reading, Value
from memlog.monitors._publishing import HEALTH

MAX_WAITING = 10_000
_LOOK_S = 0.002


class LateLosses:
    """Waits for devices on a thread of its own, which begins with the first loss that needs it.

    What is handed over is delivered in order, a value that is known already at once where nothing
    waits before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._generation = fork.generation
        self._waiting: queue.SimpleQueue[tuple[Reading, Callable[[Value | None], None]]]
        self._waiting = queue.SimpleQueue()
        self._left = 0
        self._thread: threading.Thread | None = None

    def deliver(self, reading: Reading, then: Callable[[Value | None], None]) -> None:
        """Calls ``then`` with the value: here and now, or from the thread once it is known."""
        if fork.generation != self._generation:
            self._begin()
        if not isinstance(reading, Pending) and not self._left:
            then(reading)
            return
        with self._lock:
            if self._left >= MAX_WAITING:
                HEALTH.drop("losses_waiting", "losses wait for a device: the newest are left out")
                return
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memlog-losses", daemon=True)
                self._thread.start()
                current_session.before_finish(self.settle)
        self._waiting.put((reading, then))

    def settle(self, seconds: float) -> None:
        """Waits until nothing is left, for so long at most."""
        deadline = time.monotonic() + seconds
        if fork.generation != self._generation:
            return  # what was under way is the parent's
        while self._left and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        while True:
            reading, then = self._waiting.get()
            with HEALTH.contained("reading a loss from a device"):
                then(reading.wait() if isinstance(reading, Pending) else reading)
            with self._lock:
                self._left -= 1


LATE = LateLosses()
"""The process's one: a thread for all monitors."""
fork.renew(LATE, "_lock", threading.Lock)
