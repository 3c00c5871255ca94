"""The printed lines: one subscriber prints, publishers never do."""

from __future__ import annotations

from collections.abc import Callable

from memlog.events import Batch, Event
from memlog.units import mib


class Console:
    """Prints a line for each of the first batches.

    Args:
        verbose_batches: For how many batches.
        write: Prints one line.
    """

    def __init__(self, verbose_batches: int, write: Callable[[str], object] = print) -> None:
        self._left = verbose_batches
        self._write = write
        write(f"Memory monitoring enabled (verbose for first {verbose_batches} batches)\n")

    def __call__(self, event: Event) -> None:
        """Prints what the event says, where it says something to a person."""
        if isinstance(event, Batch) and self._left > 0:
            self._left -= 1
            self._write(batch_line(event))


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
