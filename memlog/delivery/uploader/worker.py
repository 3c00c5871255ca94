"""Keeping an uploader going: again and again, patiently where the tracker is in trouble."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from memlog._internal.diagnostics import warn
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import DeliveryError
from memlog.journal.delivery_state import UploadLock, is_wanted

logger = logging.getLogger("memlog.delivery")

INTERVAL = 0.5
"""Seconds between looks at the journal."""
MAX_BACKOFF = 15.0
"""Seconds between attempts, at most, at a tracker that is in trouble."""


class UploadWorker:
    """Delivers in a thread until the journal is complete and all of it handed over.

    Args:
        uploader: What delivers.
        prepare: Called first, in the thread: imports that take seconds.

    Attributes:
        delivered: Whether the journal was complete and all of it handed over when the thread ended.
    """

    def __init__(self, uploader: Uploader, prepare: Callable[[], object] | None = None) -> None:
        self.uploader = uploader
        self.delivered = False
        self._prepare = prepare
        self._complete = threading.Event()
        self._gives_up = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"memlog-{uploader.backend}", daemon=True
        )

    def start(self) -> None:
        """Begins to deliver."""
        self._thread.start()

    def complete(self) -> None:
        """The journal is complete: deliver the rest, close, end."""
        self._complete.set()
        self._wake.set()

    def make_way_if_wanted(self) -> None:
        """Ends where another process waits to deliver the rest, as soon as nothing is under way."""
        if self._complete.is_set() and is_wanted(self.uploader.run, self.uploader.backend):
            self._gives_up.set()
            self._wake.set()

    def join(self, timeout: float) -> bool:
        """Waits for the end, at most ``timeout`` seconds; says whether it came."""
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
            except Exception as error:  # noqa: BLE001 - it comes again, with its reason, when a sink is opened
                warn(f"preparing for {self.uploader.backend} failed: {error!r}", logger)

    def _say_refusals(self, said: str) -> str:
        refused = self.uploader.refused or ""
        if refused and refused != said:
            logger.warning("%s: %s; everything else is delivered", self.uploader.backend, refused)
        return refused

    def _deliver_until_complete(self) -> None:
        pause, complete, said = INTERVAL, False, ""
        while True:
            self._wake.clear()
            if self._complete.is_set() and not complete:
                complete, pause = (
                    True,
                    INTERVAL,
                )  # somebody waits for it: soon again, after a failure
            try:
                self.uploader.deliver(complete=complete)
                said = self._say_refusals(said)
                if complete:
                    self.uploader.close()
                    self.delivered = self.uploader.refused is None
                    return  # a run that is refused is not there again by itself
                pause = INTERVAL
            except Exception as error:  # noqa: BLE001 - whatever a tracker's client raises, try again
                pause = min(pause * 2, MAX_BACKOFF)
                if str(error) != said:  # an outage of days must not fill the log
                    said = str(error)
                    warn(f"{self.uploader.backend}: {said}; trying again until it works", logger)
                    if detail := getattr(error, "detail", ""):
                        logger.info("%s: in full: %s", self.uploader.backend, detail)
            self._wake.wait(pause)
            if self._gives_up.is_set():
                logger.info("%s: `memlog sync` delivers the rest", self.uploader.backend)
                return
