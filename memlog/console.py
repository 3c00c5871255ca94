"""Lines printed for the user.

`Console` prints the events of a session. The functions return the text that monitors print.

Sizes are in "MB" of 1024² bytes, as in the older monitors that memlog replaces. docs/monitors.md lists the
lines that differ from the older monitors' lines. If there is no accelerator, a line shows the host's memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise

from memlog._internal import terminal
from memlog._internal.units import mib
from memlog.events import (
    Alert,
    Batch,
    Epoch,
    Evaluation,
    Event,
    PeakSource,
    Recorded,
    Scope,
)

_IN_ONE_LINE = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
"""Table that replaces line breaks in labels by spaces. Users choose labels, and each must be one line."""
_CLEAR = "\r\x1b[2K"
"""Text that clears a terminal's present line."""
_REWRITTEN_EVERY = 0.1
_WRITTEN_EVERY = 10.0


class Console:
    """Printer of a line for each of the first ``verbose_batches`` batches and for each alert."""

    def __init__(self, verbose_batches: int) -> None:
        self._left = verbose_batches

    def announce(self) -> None:
        """If the settings ask for batch lines, print that monitoring is on. Stream errors are raised."""
        if self._left:
            terminal.out(announcement(self._left))

    def __call__(self, event: Event) -> None:
        if isinstance(event, Batch) and self._left > 0:
            self._left -= 1
            terminal.out(batch_line(event.step, event))
        elif isinstance(event, Alert) and not event.is_of_finding:
            terminal.err(alert_line(event))

    def stop_printing_batches(self) -> None:
        """Print no more lines for batches, because a monitor of the trainer prints such lines."""
        self._left = 0


def usage(event: Recorded | Evaluation) -> str:
    """Return text such as ``CPU: 850.2 MB | GPU Allocated: 15.3 MB | GPU Reserved: 20.0 MB``."""
    host = f"CPU: {_mb(event.rss)}"
    if not event.devices:
        return f"{host} | GPU: Not available"
    device = event.devices[0]
    return f"{host} | GPU Allocated: {_mb(device.allocated)} | GPU Reserved: {_mb(device.reserved)}"


def announcement(batches: int) -> str:
    """Return the message that monitoring is on. The first ``batches`` batches get a line."""
    if not batches:
        return "Memory monitoring enabled\n"
    first = "batch" if batches == 1 else f"{batches} batches"
    return f"Memory monitoring enabled (verbose for first {first})\n"


def batch_line(index: int, event: Batch, loss: str | None = None) -> str:
    """Return a line such as ``  Batch 0: GPU 23.1 MB, CPU 1645.1 MB, loss=0.014553``."""
    shown = "" if loss is None else f", loss={loss}"
    return f"  Batch {index}: {_batch_figures(event)}{shown}"


def _batch_figures(event: Batch) -> str:
    figures = [
        f"{'GPU' if device.name.startswith('cuda') else device.name} {_mb(device.allocated)}"
        for device in event.devices
        if device.allocated is not None
    ]
    if event.rss is not None:
        figures.append(f"CPU {_mb(event.rss)}")
    return ", ".join(figures) or "memory unknown"


def evaluation_lines(index: int, event: Evaluation, loss: str | None = None) -> str:
    """Return the lines of one call of a loss function: the memory, and the loss or the error.

    The function's wrapper counts ``index`` from 0. ``loss`` is ``None`` if unknown.
    """
    line = f"  Loss evaluation {index}: {usage(event)}"
    if event.error is not None:
        return f"{line}\n    Iteration {index + 1}: raised {event.error}"
    return line if loss is None else f"{line}\n    Iteration {index + 1}: loss={loss}"


def epoch_line(event: Epoch) -> str:
    """Return a line such as ``  Epoch end: CPU 1645.1 MB, peak 1702.4 MB``."""
    _, peak = _peak(event)
    if not event.devices:
        return f"  Epoch end: CPU {_mb(event.rss)}, peak {peak}"
    device = event.devices[0]
    allocated, reserved = _mb(device.allocated), _mb(device.reserved)
    return f"  Epoch end: GPU {allocated} allocated, {reserved} reserved, peak {peak}"


def optimization_line(event: Epoch) -> str:
    """Return the line printed at the end of a black-box optimisation."""
    name, peak = _peak(event)
    return f"  Peak {name} memory during optimization: {peak}"


def scope_lines(event: Scope) -> str:
    """Return the lines of a watched block: the change of memory, and a device's peak."""
    line = f"[Memory] {_label(event)}: CPU {_change(event.rss_change)}"
    if not event.devices:
        return line
    device = event.devices[0]
    peak = _qualified(device.peak, device.peak_source)
    return f"{line}, GPU {_change(device.allocated)}\n         Peak GPU: {peak}"


def point_line(event: Recorded) -> str:
    """Return the label of a recorded point and the memory in use."""
    return f"{_label(event)}{usage(event)}"


def profile_lines(points: Sequence[Recorded]) -> str:
    """Return the change from each point to the next; empty text for fewer than two points."""
    changes = [f"      {_change_between(*pair)}" for pair in pairwise(points)]
    return "\n".join(["    Memory profile:", *changes]) if changes else ""


def _change_between(before: Recorded, after: Recorded) -> str:
    name, size = _main_figure(after)
    _, start = _main_figure(before) if before.devices or not after.devices else (name, 0)
    change = None if size is None or start is None else size - start
    labels = f"{_label(before)} \u2192 {_label(after)}"
    return f"{labels}: {name} {_mb(size)} ({_change(change)})"


def summary_lines(points: Sequence[Recorded], omitted: int = 0) -> str:
    """Return a line for each point of a `MemoryTracker`. ``omitted``: number of earlier points left out."""
    left_out = [f"  ({omitted} earlier points are left out)"] if omitted else []
    lines = [f"  {_label(point)}: {usage(point)}" for point in points]
    return "\n".join(["Memory summary:", *left_out, *(lines or ["  (no points were recorded)"])])


def _main_figure(event: Recorded) -> tuple[str, int | None]:
    return ("GPU", event.devices[0].allocated) if event.devices else ("CPU", event.rss)


def _peak(event: Epoch) -> tuple[str, str]:
    """Return ``GPU`` and the first device's peak; without devices, return ``CPU`` and the host's peak."""
    if not event.devices:
        return "CPU", _qualified(event.rss_peak, event.rss_peak_source)
    device = event.devices[0]
    return "GPU", _qualified(device.peak, device.peak_source)


def _qualified(size: int | None, source: PeakSource | None) -> str:
    """Return a peak as text. If the peak is not exact, its source follows in parentheses."""
    return _mb(size) if source in (None, "exact") else f"{_mb(size)} ({source})"


def _label(event: Recorded | Scope) -> str:
    return event.label.translate(_IN_ONE_LINE)


def _mb(size: int | None) -> str:
    value = mib(size)
    return "unknown" if value is None else f"{value:.1f} MB"


def _change(size: int | None) -> str:
    value = mib(size)
    # Rounding first and adding 0.0 avoids "-0.0 MB".
    return "unknown" if value is None else f"{round(value, 1) + 0.0:+.1f} MB"


class ProgressLine:
    """Line on standard error that shows an optimiser's progress. In a terminal, the same line is rewritten.

    If standard error is not a terminal, a new line is printed at most every ten seconds, and at the end.
    """

    def __init__(self, label: str) -> None:
        self._label = label.translate(_IN_ONE_LINE)
        self._last = 0.0
        self._begun = time.monotonic()

    def update(self, evaluations: int, iterations: int, loss: str | None) -> None:
        """Show the counts, if enough time has passed since the last line."""
        stream, now = sys.stderr, time.monotonic()
        if stream is None:
            return
        live = stream.isatty()
        due = (
            self._last + _REWRITTEN_EVERY if live else (self._last or self._begun) + _WRITTEN_EVERY
        )
        if now < due:
            return
        self._last = now
        text = progress_line(self._label, evaluations, iterations, loss)
        # The carriage return makes the next printed text overwrite this line.
        stream.write(f"{_CLEAR}{text}\r" if live else f"{text}\n")
        stream.flush()

    def close(self, evaluations: int, iterations: int, loss: str | None) -> None:
        clear = _CLEAR if sys.stderr is not None and sys.stderr.isatty() else ""
        terminal.err(clear + progress_line(self._label, evaluations, iterations, loss))


def progress_line(label: str, evaluations: int, iterations: int, loss: str | None) -> str:
    """Return a line such as ``  L-BFGS-B: 23 evaluations, 20 iterations, loss=0.025286``."""
    counts = f"{_counted(evaluations, 'evaluation')}, {_counted(iterations, 'iteration')}"
    return f"  {label}: {counts}" + ("" if loss is None else f", loss={loss}")


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def alert_line(event: Alert) -> str:
    """Return a line such as ``memlog: warning: host.rss is 33.1 GiB, over 32 GiB (step 120)``.

    For an alert without a step, the line ends with, for example, ``(at evaluation 3)``.
    """
    message = f"{event.title}: {event.text}" if event.text else event.title
    where = event.where if event.step is not None or event.where is None else f"at {event.where}"
    at = "" if where is None else f" ({where})"
    return f"memlog: {event.level}: {message}{at}"
