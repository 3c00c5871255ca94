"""CSV file with every point of a run. A tracker's run with fewer rows than steps gets this file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

from memlog._internal.safe_files import replacing
from memlog.events import Artifact, now_us
from memlog.journal import Header, RunDirectory
from memlog.journal.artifacts import safe_name
from memlog.metrics import Plan
from memlog.sink import Point

SERIES_KIND = "series"
_COLUMNS = ("axis", "index", "time_us", "name", "value")


def write_series(
    run: RunDirectory, name: str, belongs: Callable[[Header], bool], offset: int = 0
) -> Artifact:
    """Write every point of the chosen segments to a CSV file in the run's ``artifacts`` folder.

    The file's columns are axis, index, time_us (Unix time in microseconds), name and value. A segment is
    chosen if ``belongs`` returns True for its header. ``offset`` is `memlog.journal.Binding.offset` of the
    tracker's run. Steps have the same numbers as in that run.

    Raises:
        OSError: the file can't be written.
    """
    safe = safe_name(name)
    path = f"{run.artifacts.name}/{safe}"
    with replacing(run.path, path) as target:
        file = io.TextIOWrapper(target, encoding="utf-8", newline="", write_through=True)
        rows = csv.writer(file)
        rows.writerow(_COLUMNS)
        for journal in run.files():
            plan: Plan[Any] = Plan("full", offset=offset)
            header, chosen = None, False
            for entry in journal.read():
                if entry.header is not header:
                    header, before = entry.header, chosen
                    chosen = belongs(header)
                    if chosen != before:
                        _write(rows, plan.flush())
                if chosen:
                    _write(rows, plan.feed(entry.event, entry.start))
            _write(rows, plan.flush())
        file.flush()
        file.detach()
        size = target.tell()
    return Artifact(now_us(), safe, SERIES_KIND, path, size)


def _write(rows: Any, points: list[Point]) -> None:
    rows.writerows((p.axis, p.index, p.time_us, p.name, repr(p.value)) for p in points)
