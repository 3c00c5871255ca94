"""Threads that deliver repeatedly: an uploader's, and that of sinks which the user passed as objects."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from memlog._internal.diagnostics import Diagnostics, warn
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import DeliveryError
from memlog.events import End
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import UploadLock, is_wanted
from memlog.sink import Sink, Target

logger = logging.getLogger("memlog.delivery")

INTERVAL = 0.5
"""Seconds between passes over the journal."""
MAX_BACKOFF = 15.0
"""Maximum seconds between attempts while the tracker fails."""


class UploadWorker:
    """Thread that delivers until the journal is complete and delivered.

    The thread first calls ``prepare``, which can import the tracker's client.

    Attributes:
        delivered: True if the journal was complete and all of it delivered when the thread ended.
    """

    def __init__(self, uploader: Uploader, prepare: Callable[[], object] | None = None) -> None:
        self.uploader = uploader
        self.delivered = False
        self._prepare = prepare
        self._complete = threading.Event()
        self._gives_up = threading.Event()
        self._wake = threading.Event()
        self._settling: deque[Callable[[], object]] = deque()
        self._thread = threading.Thread(
            target=self._run, name=f"memlog-{uploader.backend}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def complete(self) -> None:
        """Tell the thread that the journal is complete. The thread delivers the remaining data and ends."""
        self._complete.set()
        self._wake.set()

    def settle(self, run_id: str, end: End, on_settled: Callable[[], object]) -> None:
        """Deliver what is ready, describe a user's run that ends, and then call ``on_settled``.

        The thread does this. ``end`` is how the user's run ends.
        """
        self._settling.append(partial(self._settle, run_id, end, on_settled))
        self._wake.set()

    def _settle(self, run_id: str, end: End, on_settled: Callable[[], object]) -> None:
        self.uploader.describe(run_id, end)
        on_settled()

    def stop_if_wanted(self) -> None:
        """After a call of `complete`, end the thread if another process waits to deliver the remaining data.

        The thread first completes its current pass.
        """
        if self._complete.is_set() and is_wanted(self.uploader.run, self.uploader.backend):
            self._gives_up.set()
            self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the thread to end; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with UploadLock(self.uploader.run, self.uploader.backend):
                self._prepare_quietly()
                self._deliver_until_complete()
        except DeliveryError as error:
            warn(str(error), logger)

    def _prepare_quietly(self) -> None:
        if self._prepare is not None:
            try:
                self._prepare()
            except Exception as error:  # noqa: BLE001 - the opening of a sink raises the error again
                warn(f"preparing for {self.uploader.backend} failed: {error!r}", logger)

    def _log_refusals(self, logged: str) -> str:
        refused = self.uploader.refused or ""
        if refused and refused != logged:
            logger.warning("%s: %s; everything else is delivered", self.uploader.backend, refused)
        return refused

    def _deliver_until_complete(self) -> None:
        pause, complete, logged = INTERVAL, False, ""
        while True:
            # Cleared before the work, so that a call that comes during the work wakes the thread
            # again.
            self._wake.clear()
            if self._complete.is_set() and not complete:
                # The user waits in `finish`: after a failure, the next attempt comes soon.
                complete, pause = True, INTERVAL
            try:
                # Copied before the delivery, which then covers all of them.
                settling = list(self._settling)
                self.uploader.deliver(complete=complete)
                for settle in settling:
                    settle()
                    self._settling.remove(settle)
                logged = self._log_refusals(logged)
                if complete:
                    self.uploader.close()
                    self.delivered = self.uploader.refused is None
                    return  # also if the tracker refuses a run: only the user can restore the run
                pause = INTERVAL
            except Exception as error:  # noqa: BLE001 - try again after any error of a tracker's client
                pause = min(pause * 2, MAX_BACKOFF)
                if str(error) != logged:  # log a long outage once
                    logged = str(error)
                    warn(f"{self.uploader.backend}: {logged}; trying again until it works", logger)
                    if detail := getattr(error, "detail", ""):
                        logger.info("%s: full error: %s", self.uploader.backend, detail)
            self._wake.wait(pause)
            if self._gives_up.is_set():
                logger.info("%s: `memlog sync` delivers the rest", self.uploader.backend)
                return


def deliver_to(
    sinks: Sequence[Sink], run: RunDirectory, taken: Sequence[str], diagnostics: Diagnostics
) -> list[UploadWorker]:
    """Start an upload thread for each of the sinks, and return the threads that were started.

    ``taken`` has the names of other backends. No sink gets any of these names.
    """
    threads: list[UploadWorker] = []
    for name, sink in zip(_names(sinks, taken), sinks, strict=True):
        with diagnostics.contained(f"starting to deliver to {name}"):
            thread = UploadWorker(Uploader(run, name, _opener(sink), may_open_own=True))
            thread.start()
            threads.append(thread)
    return threads


def _opener(sink: Sink) -> Callable[[Target], Sink]:
    return lambda _: sink


def _names(sinks: Sequence[Sink], taken: Sequence[str]) -> list[str]:
    """Return a name for each sink: the name of its class, with a number if the name is taken."""
    names: list[str] = []
    for sink in sinks:
        name = base = type(sink).__name__.lower()
        number = 1
        while name in taken or name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names
