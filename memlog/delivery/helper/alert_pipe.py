"""Pipe that sends the helper process's alerts to the training process during training.

A thread in the training process reads the pipe, and sleeps until data arrives. The pipe serves only the
console and the user's callback, because the journal has these alerts already.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import Descriptor
from memlog.events import Alert, Event

_decode = msgspec.json.Decoder(Alert).decode


class AlertListener:
    """Reader of the pipe, in the training process. It calls ``on_alert`` on its own thread.

    Attributes:
        fd: Descriptor to pass to the helper process; `start` closes it in this process.

    Raises:
        OSError: the pipe can't be created.
    """

    def __init__(self, on_alert: Callable[[Alert], object], diagnostics: Diagnostics) -> None:
        self._on_alert = on_alert
        self._diagnostics = diagnostics
        ours, theirs = os.pipe()
        self._ours, self._theirs = Descriptor(ours), Descriptor(theirs)
        self.fd = self._theirs.number

    def another(self) -> AlertListener:
        """Return a new listener with the same callback, for another helper."""
        return AlertListener(self._on_alert, self._diagnostics)

    def start(self, on_closed: Callable[[], object]) -> None:
        """Start the listener's thread. The thread ends when the helper ends.

        ``on_closed`` is called on the listener's thread when the helper has closed its end of the pipe.

        Raises:
            RuntimeError: the thread can't be started. Both ends of the pipe are then closed.
        """
        self._theirs.close()
        try:
            threading.Thread(
                target=self._listen, args=(on_closed,), name="memlog-alerts", daemon=True
            ).start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close both ends of the pipe. Call it only if the listener's thread does not run."""
        self._theirs.close()
        self._ours.close()

    def _listen(self, on_closed: Callable[[], object]) -> None:
        unfinished = b""
        with self._diagnostics.contained("listening for the helper process's alerts"):
            while data := os.read(self._ours.number, 65536):
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    with self._diagnostics.contained("an alert of the helper process"):
                        self._on_alert(_decode(line))
        self._ours.close()
        with self._diagnostics.contained("looking for the helper process"):
            on_closed()


def alert_sender(fd: int) -> Callable[[Event], None]:
    """Return a subscriber that writes alerts to the pipe. It does not wait for the trainer to read them."""
    os.set_blocking(fd, False)
    encode = msgspec.json.Encoder().encode

    def send(event: Event) -> None:
        if isinstance(event, Alert):
            try:
                os.write(fd, encode(event) + b"\n")
            except OSError as error:  # the trainer has ended, or does not read
                import logging  # noqa: PLC0415 - the training process needs it not

                logger = logging.getLogger("memlog.delivery")
                logger.warning("an alert could not be sent to the trainer: %s", error)

    return send
