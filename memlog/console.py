"""Lines printed for the user.

`Console` prints the events of a session. The functions return the text that monitors print.

Sizes are in "MB" of 1024² bytes, as in the older monitors that memlog replaces. docs/project/old-monitors.md
lists the lines that differ. If there is no accelerator, a line shows the host's memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise

from memlog._internal import terminal
from memlog._internal.redact import without_credentials
from memlog._internal.terminal import mib
from memlog.events import (
    Alert,
    Batch,
    Epoch,
    Evaluation,
    Event,
    Reading,
    Recorded,
    Scope,
    changes,
    main_readings,
)

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
    host, *devices = main_readings(event)
    shown = f"CPU: {_mb(host.level)}"
    if not devices:
        return f"{shown} | GPU: Not available"
    return (
        f"{shown} | GPU Allocated: {_mb(devices[0].level)} | GPU Reserved: {_reserved(devices[0])}"
    )


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
    host, *devices = main_readings(event)
    figures = [
        f"{_short_name(each)} {_mb(each.level)}"
        for each in (*devices, host)
        if each.level is not None
    ]
    return ", ".join(figures) or "memory unknown"


def _short_name(reading: Reading) -> str:
    is_other = reading.device is not None and not reading.owner.startswith("cuda")
    return reading.owner if is_other else _kind(reading)


def evaluation_lines(index: int, event: Evaluation, loss: str | None = None) -> str:
    """Return the lines of one call of a loss function: the memory, and the loss or the error.

    The function's wrapper counts ``index`` from 0. ``loss`` is ``None`` if unknown.
    """
    line = f"  Loss evaluation {index}: {usage(event)}"
    if event.error is not None:
        return f"{line}\n    Iteration {index + 1}: raised {terminal.one_line(event.error)}"
    return line if loss is None else f"{line}\n    Iteration {index + 1}: loss={loss}"


def epoch_line(event: Epoch) -> str:
    """Return a line such as ``  Epoch end: CPU 1645.1 MB, peak 1702.4 MB``."""
    first = _first(event)
    level, peak = _mb(first.level), _peak(first)
    if first.device is None:
        return f"  Epoch end: CPU {level}, peak {peak}"
    return f"  Epoch end: GPU {level} allocated, {_reserved(first)} reserved, peak {peak}"


def optimization_line(event: Epoch) -> str:
    """Return the line printed at the end of a black-box optimisation."""
    first = _first(event)
    return f"  Peak {_kind(first)} memory during optimization: {_peak(first)}"


def scope_lines(event: Scope) -> str:
    """Return the lines of a watched block: the change of memory, and a device's peak."""
    host, *devices = changes(event)
    line = f"[Memory] {_label(event)}: CPU {_change(host.level)}"
    if not devices:
        return line
    return f"{line}, GPU {_change(devices[0].level)}\n         Peak GPU: {_peak(devices[0])}"


def point_line(event: Recorded) -> str:
    """Return the label of a recorded point and the memory in use."""
    return f"{_label(event)}{usage(event)}"


def profile_lines(points: Sequence[Recorded]) -> str:
    """Return the change from each point to the next; empty text for fewer than two points."""
    changes = [f"      {_change_between(*pair)}" for pair in pairwise(points)]
    return "\n".join(["    Memory profile:", *changes]) if changes else ""


def _change_between(before: Recorded, after: Recorded) -> str:
    first, earlier = _first(after), _first(before)
    # Without a device before, there was nothing on it.
    start = earlier.level if earlier.device or not first.device else 0
    change = None if first.level is None or start is None else first.level - start
    labels = f"{_label(before)} \u2192 {_label(after)}"
    return f"{labels}: {_kind(first)} {_mb(first.level)} ({_change(change)})"


def summary_lines(points: Sequence[Recorded], omitted: int = 0) -> str:
    """Return a line for each point of a `MemoryTracker`. ``omitted``: number of earlier points left out."""
    left_out = [f"  ({omitted} earlier points are left out)"] if omitted else []
    lines = [f"  {_label(point)}: {usage(point)}" for point in points]
    return "\n".join(["Memory summary:", *left_out, *(lines or ["  (no points were recorded)"])])


def _first(event: Epoch | Recorded) -> Reading:
    """Return the reading of the first device; without devices, that of the process."""
    return main_readings(event)[:2][-1]


def _kind(reading: Reading) -> str:
    return "CPU" if reading.device is None else "GPU"


def _reserved(reading: Reading) -> str:
    return _mb(None if reading.device is None else reading.device.reserved)


def _peak(reading: Reading) -> str:
    """Return a peak as text. If the peak is not exact, its source follows in parentheses."""
    size, source = _mb(reading.peak), reading.source
    return size if source in (None, "exact") else f"{size} ({source})"


def _label(event: Recorded | Scope) -> str:
    return terminal.one_line(without_credentials(event.label))


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
        self._label = terminal.one_line(label)
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
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(_CLEAR)
        terminal.err(progress_line(self._label, evaluations, iterations, loss))


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
    return f"memlog: {event.level}: {terminal.one_line(message)}{at}"
