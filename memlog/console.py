"""Lines printed for the user.

`Console` prints the events of a session. `show` prints the notices of a monitor.

Sizes are in "MB" of 1024² bytes, as in the older monitors that memlog replaces. docs/monitors.md lists the
lines that differ from the older monitors' lines. Without an accelerator, a line shows the host's memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec

from memlog._internal import terminal
from memlog._internal.units import mib
from memlog.events import (
    Alert,
    Batch,
    DeviceReading,
    Epoch,
    Evaluation,
    Event,
    PeakSource,
    Recorded,
    Scope,
)


class Announcement(msgspec.Struct, frozen=True):
    """Message that monitoring is on."""

    verbose_batches: int


class BatchNotice(msgspec.Struct, frozen=True):
    """Batch, numbered within its epoch, and its loss as text."""

    index: int
    event: Batch
    loss: str | None = None


class EvaluationNotice(msgspec.Struct, frozen=True):
    """Call of a loss function, numbered by the function's wrapper, and its loss as text."""

    index: int
    event: Evaluation
    loss: str | None = None


class OptimizationNotice(msgspec.Struct, frozen=True):
    """End of a black-box optimisation."""

    event: Epoch


class ProfileNotice(msgspec.Struct, frozen=True):
    """Memory readings at the labelled points of one batch."""

    points: tuple[Recorded, ...]


class SummaryNotice(msgspec.Struct, frozen=True):
    """Points of a `MemoryTracker`. ``omitted`` is the number of earlier points that are left out."""

    points: tuple[Recorded, ...]
    omitted: int = 0


_IN_ONE_LINE = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
"""Table that replaces line breaks in labels by spaces. Users choose labels, and each must be one line."""
_CLEAR = "\r\x1b[2K"
"""Text that clears a terminal's present line."""
_REWRITTEN_EVERY = 0.1
_WRITTEN_EVERY = 10.0

Notice: TypeAlias = (
    Announcement
    | BatchNotice
    | EvaluationNotice
    | OptimizationNotice
    | ProfileNotice
    | SummaryNotice
    | Recorded
    | Epoch
    | Scope
)
"""Event, or events with extra text, that a monitor prints for the user."""


class Console:
    """Printer of a line for each of the first batches and for each alert.

    Args:
        verbose_batches: Number of the run's first batches for which a line is printed.
    """

    def __init__(self, verbose_batches: int) -> None:
        self._left = verbose_batches

    def announce(self) -> None:
        """Print that monitoring is on, if lines for batches follow.

        Raises:
            Exception: Any error of the stream.
        """
        if self._left:
            show(Announcement(self._left))

    def __call__(self, event: Event) -> None:
        """Print the event's line, if it has one."""
        if isinstance(event, Batch) and self._left > 0:
            self._left -= 1
            terminal.out(batch_line(event))
        elif isinstance(event, Alert) and not event.is_of_finding:
            terminal.err(alert_line(event))

    def stop_printing_batches(self) -> None:
        """Print no more batches, because a monitor of the trainer prints them."""
        self._left = 0


def show(notice: Notice, write: Callable[[str], object] = terminal.out) -> None:
    """Print a monitor's notice."""
    text = "\n".join(_lines(notice))
    if text:
        write(text)


def batch_line(event: Batch) -> str:
    """Return a line such as ``  Batch 0: GPU 23.1 MB, CPU 1645.1 MB``.

    Without an accelerator, the line has no figure for it.
    """
    return f"  Batch {event.step}: {_batch_figures(event)}"


def usage(event: Recorded | Evaluation) -> str:
    """Return text such as ``CPU: 850.2 MB | GPU Allocated: 15.3 MB | GPU Reserved: 20.0 MB``."""
    host = f"CPU: {_mb(event.rss)}"
    if not event.devices:
        return f"{host} | GPU: Not available"
    device = event.devices[0]
    return f"{host} | GPU Allocated: {_mb(device.allocated)} | GPU Reserved: {_mb(device.reserved)}"


def _lines(notice: Notice) -> Sequence[str]:  # noqa: PLR0911 - one return for each kind
    if isinstance(notice, Announcement):
        return [_announcement(notice.verbose_batches)]
    if isinstance(notice, BatchNotice):
        loss = "" if notice.loss is None else f", loss={notice.loss}"
        return [f"  Batch {notice.index}: {_batch_figures(notice.event)}{loss}"]
    if isinstance(notice, EvaluationNotice):
        return _evaluation(notice)
    if isinstance(notice, Epoch):
        return [_epoch(notice)]
    if isinstance(notice, Scope):
        return _scope(notice)
    if isinstance(notice, Recorded):
        return [f"{_label(notice)}{usage(notice)}"]
    if isinstance(notice, OptimizationNotice):
        name, peak = _peak(notice.event)
        return [f"  Peak {name} memory during optimization: {peak}"]
    if isinstance(notice, ProfileNotice):
        return _profile(notice.points)
    return _summary(notice)


def _announcement(batches: int) -> str:
    if not batches:
        return "Memory monitoring enabled\n"
    first = "batch" if batches == 1 else f"{batches} batches"
    return f"Memory monitoring enabled (verbose for first {first})\n"


def _batch_figures(event: Batch) -> str:
    figures = [
        f"{'GPU' if device.name.startswith('cuda') else device.name} {_mb(device.allocated)}"
        for device in event.devices
        if device.allocated is not None
    ]
    if event.rss is not None:
        figures.append(f"CPU {_mb(event.rss)}")
    return ", ".join(figures) or "memory unknown"


def _evaluation(notice: EvaluationNotice) -> list[str]:
    event = notice.event
    lines = [f"  Loss evaluation {notice.index}: {usage(event)}"]
    if event.error is not None:
        lines.append(f"    Iteration {notice.index + 1}: raised {event.error}")
    elif notice.loss is not None:
        lines.append(f"    Iteration {notice.index + 1}: loss={notice.loss}")
    return lines


def _epoch(event: Epoch) -> str:
    _, peak = _peak(event)
    if not event.devices:
        return f"  Epoch end: CPU {_mb(event.rss)}, peak {peak}"
    device = event.devices[0]
    allocated, reserved = _mb(device.allocated), _mb(device.reserved)
    return f"  Epoch end: GPU {allocated} allocated, {reserved} reserved, peak {peak}"


def _scope(event: Scope) -> list[str]:
    line = f"[Memory] {_label(event)}: CPU {_change(event.rss_change)}"
    if not event.devices:
        return [line]
    device = event.devices[0]
    return [
        f"{line}, GPU {_change(device.allocated)}",
        f"         Peak GPU: {_qualified(device.peak, device.peak_source)}",
    ]


def _profile(points: tuple[Recorded, ...]) -> list[str]:
    pairs = list(pairwise(points))
    if not pairs:
        return []
    return ["    Memory profile:", *(f"      {_change_between(*pair)}" for pair in pairs)]


def _change_between(before: Recorded, after: Recorded) -> str:
    name, size = _main_figure(after)
    _, start = _main_figure(before) if before.devices or not after.devices else (name, 0)
    change = None if size is None or start is None else size - start
    labels = f"{_label(before)} \u2192 {_label(after)}"
    return f"{labels}: {name} {_mb(size)} ({_change(change)})"


def _summary(notice: SummaryNotice) -> list[str]:
    lines = ["Memory summary:", *(f"  {_label(point)}: {usage(point)}" for point in notice.points)]
    if not notice.points:
        lines.append("  (no points were recorded)")
    if notice.omitted:
        lines.insert(1, f"  ({notice.omitted} earlier points are left out)")
    return lines


def _main_figure(event: Recorded) -> tuple[str, int | None]:
    return ("GPU", event.devices[0].allocated) if event.devices else ("CPU", event.rss)


def _peak(event: Epoch) -> tuple[str, str]:
    """Return ``GPU`` and the first device's peak; without devices, return ``CPU`` and the host's peak."""
    device: DeviceReading | None = event.devices[0] if event.devices else None
    if device is not None:
        return "GPU", _qualified(device.peak, device.peak_source)
    return "CPU", _qualified(event.rss_peak, event.rss_peak_source)


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
    """Progress of an optimiser on the standard error: one line that is rewritten in a terminal.

    If the standard error is not a terminal, a new line is printed at most every ten seconds, and at the end.

    Args:
        label: Text at the beginning of the line.
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
        """Show the final counts."""
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
