"""The printed lines: one subscriber prints, publishers never do."""

from __future__ import annotations

import sys
from collections.abc import Callable

from memlog.events import Alert, Batch, Event
from memlog.units import mib


class Console:
    """Prints a line for each of the first batches, and one for each alert.

    Args:
        verbose_batches: For how many batches.
        write: Prints one line of the batches'.
        warn: Prints one line of an alert's; by itself to the standard error.
    """

    def __init__(
        self,
        verbose_batches: int,
        write: Callable[[str], object] = print,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        self._left = verbose_batches
        self._write = write
        self._warn = warn or _to_stderr
        if verbose_batches:
            write(f"Memory monitoring enabled (verbose for first {verbose_batches} batches)\n")

    def __call__(self, event: Event) -> None:
        """Prints what the event says, where it says something to a person."""
        if isinstance(event, Batch) and self._left > 0:
            self._left -= 1
            self._write(batch_line(event))
        elif isinstance(event, Alert):
            self._warn(alert_line(event))


def batch_line(event: Batch) -> str:
    """``  Batch 0: GPU 23.1 MB, CPU 1645.1 MB``; without an accelerator its part is left out."""
    figures = [
        f"{'GPU' if device.name.startswith('cuda') else device.name} {mib(device.allocated):.1f} MB"
        for device in event.devices
        if device.allocated is not None
    ]
    if event.rss is not None:
        figures.append(f"CPU {mib(event.rss):.1f} MB")
    return f"  Batch {event.step}: {', '.join(figures) or 'memory unknown'}"


def alert_line(event: Alert) -> str:
    """``memlog: warning: host.rss is 33.1 GiB, over 32 GiB (step 120)``."""
    told = f"{event.title}: {event.text}" if event.text else event.title
    at = "" if event.step is None else f" (step {event.step})"
    return f"memlog: {event.level}: {told}{at}"


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
