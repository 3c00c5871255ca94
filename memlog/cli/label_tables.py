"""Tables of blocks, phases and points that the user recorded, by label."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memlog._internal.units import format_bytes, format_duration
from memlog.cli.output import plain, table
from memlog.reports.phases import known_peak
from memlog.reports.schema import Levels, PhaseFacts, PointFacts, ScopeFacts

_SHOWN = 50
"""Maximum number of labels in a table. The JSON document also has the labels that a table omits."""


def scopes(console: Console, by_label: Mapping[str, ScopeFacts]) -> Table:
    """Return a table with rows for each label's blocks: one for the host, and one for each accelerator."""
    made = _made(console, "count", "time", "last change", "largest change", "peak", "errors")
    for label, facts in list(by_label.items())[:_SHOWN]:
        made.add_row(
            plain(label),
            "host",
            f"{facts.count:,}",
            format_duration(facts.duration_s),
            *_changes(facts.rss_change),
            "",
            f"{facts.errors:,}" if facts.errors else "",
        )
        for name, device in facts.devices.items():
            source = "" if device.peak_source in {None, "exact"} else f" ({device.peak_source})"
            peak = format_bytes(device.peak_bytes) + source
            made.add_row("", plain(name), "", "", *_changes(device.allocated_change), peak, "")
    return _with_the_rest(made, len(by_label))


def phases(console: Console, by_label: Mapping[str, PhaseFacts]) -> Table:
    """Return a table with rows for each label's phases: one for the host, and one for each accelerator."""
    made = _made(console, "count", "time", "peak", "made", "errors")
    for label, facts in list(by_label.items())[:_SHOWN]:
        once = (
            f"{facts.count:,}",
            format_duration(facts.duration_s),
            f"{facts.errors:,}" if facts.errors else "",
        )
        title = plain(" > ".join([*facts.within, label]))
        for name, peak in facts.peaks.items():
            count, time, errors = once
            maker = "the run's peak" if peak.made_the_peak else ""
            made.add_row(title, plain(name), count, time, known_peak(peak), maker, errors)
            title, once = Text(), ("", "", "")
    return _with_the_rest(made, len(by_label))


def points(console: Console, by_label: Mapping[str, PointFacts]) -> Table:
    """Return a table with rows for each label's points: one for the host, and one for each accelerator."""
    made = _made(console, "count", "last", "largest")
    for label, facts in list(by_label.items())[:_SHOWN]:
        made.add_row(plain(label), "host", f"{facts.count:,}", *_sizes(facts.rss))
        for name, levels in facts.allocated.items():
            made.add_row("", plain(name), "", *_sizes(levels))
    return _with_the_rest(made, len(by_label))


def _made(console: Console, *figures: str) -> Table:
    return table(console, "label", "of", *figures, right=figures, folded=["label"])


def _with_the_rest(made: Table, labels: int) -> Table:
    if labels > _SHOWN:
        made.add_row(f"and {labels - _SHOWN:,} more labels: --json has them")
    return made


def _sizes(levels: Levels) -> tuple[str, str]:
    return format_bytes(levels.last_bytes), format_bytes(levels.largest_bytes)


def _changes(levels: Levels) -> tuple[str, str]:
    return _signed(levels.last_bytes), _signed(levels.largest_bytes)


def _signed(size: int | None) -> str:
    return f"+{format_bytes(size)}" if size is not None and size > 0 else format_bytes(size)
