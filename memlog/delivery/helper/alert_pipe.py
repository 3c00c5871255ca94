"""Alerts about what the helper process reads, told to the trainer's process while training goes on.

A pipe from the helper; the trainer's end is read by a thread that sleeps until there is something. The
journal has these alerts already: here they only reach the console and the callback.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import msgspec

from memlog._internal.descriptors import Descriptor
from memlog._internal.diagnostics import Diagnostics
from memlog.events import Alert, Event

logger = logging.getLogger("memlog.delivery")

_decode = msgspec.json.Decoder(Alert).decode
_MAX_LINE = 65536


class AlertListener:
    """The trainer's end.

    Args:
        on_alert: Called with each alert, on the listener's thread.
        diagnostics: Counts its errors.

    Attributes:
        fd: The end to hand to the helper process; `start` closes it here.

    Raises:
        OSError: there can be no pipe.
    """

    def __init__(self, on_alert: Callable[[Alert], object], diagnostics: Diagnostics) -> None:
        self._on_alert = on_alert
        self._diagnostics = diagnostics
        ours, theirs = os.pipe()
        self._ours, self._theirs = Descriptor(ours), Descriptor(theirs)
        self.fd = self._theirs.number

    def another(self) -> AlertListener:
        """One like it, for another helper.

        Raises:
            OSError: there can be no pipe.
        """
        return AlertListener(self._on_alert, self._diagnostics)

    def start(self, on_hang_up: Callable[[], object] = lambda: None) -> None:
        """Begins to listen. The thread ends when the helper does.

        Args:
            on_hang_up: Called by the thread when nothing more comes.

        Raises:
            RuntimeError: there can be no more threads; nothing is open then.
        """
        self._theirs.close()
        try:
            threading.Thread(
                target=self._listen, args=(on_hang_up,), name="memlog-alerts", daemon=True
            ).start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives both ends back, where nobody listens."""
        self._theirs.close()
        self._ours.close()

    def _listen(self, on_hang_up: Callable[[], object]) -> None:
        rest = b""
        with self._diagnostics.contained("listening for the helper process's alerts"):
            # The program may close every descriptor: the number is then another file's, and not ours to read.
            while self._ours.status() is not None and (
                data := os.read(self._ours.number, _MAX_LINE)
            ):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    with self._diagnostics.contained("an alert of the helper process"):
                        self._on_alert(_decode(line))
        self._ours.close()
        with self._diagnostics.contained("looking for the helper process"):
            on_hang_up()


def teller(fd: int) -> Callable[[Event], None]:
    """The helper's end: a subscriber that passes alerts on, and never waits for the trainer."""
    os.set_blocking(fd, False)
    encode = msgspec.json.Encoder().encode

    def tell(event: Event) -> None:
        if isinstance(event, Alert):
            try:
                os.write(fd, encode(event) + b"\n")
            except OSError as error:  # the trainer is gone, or stands still: the journal has it
                logger.warning("an alert could not be told to the trainer: %s", error)

    return tell
