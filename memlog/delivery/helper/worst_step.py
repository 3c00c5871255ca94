"""Flame graph of the traced step that needed most memory so far. The helper process makes the graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event
from memlog.journal import RunDirectory

logger = logging.getLogger("memlog.delivery")

FLAME_GRAPH = "worst-step.speedscope.json.gz"
PAGE = "worst-step.html"
"""HTML page of the flame graph. Trackers can't show `FLAME_GRAPH`, because that file is compressed."""
KIND = "flamegraph"


class WorstStepGraph:
    """Flame graph of the worst traced step, and the graph's HTML page.

    The worst step is the one that needed most memory. Both files are saved again for each worse step.
    """

    def __init__(
        self, run: RunDirectory, publish: Callable[[Event], object], diagnostics: Diagnostics
    ) -> None:
        self._run = run
        self._publish = publish
        self._diagnostics = diagnostics
        self._seen = 0

    def look(self) -> None:
        """Make a new graph if the worst step has changed since the last call. Never raises."""
        path = self._run.worst_step
        try:
            found = path.stat()
        except OSError:
            return  # no step has been traced yet
        if found.st_mtime_ns != self._seen:
            self._seen = found.st_mtime_ns
            with self._diagnostics.contained("making a flame graph"):
                self._draw(found.st_size)

    def _draw(self, size: int) -> None:
        # Imported here: many runs trace nothing, and the import would delay the helper's first sample.
        from tempfile import TemporaryDirectory  # noqa: PLC0415

        from memlog.journal.artifacts import keep, keep_text  # noqa: PLC0415
        from memlog.reports.worst_step import MAX_TRACE_BYTES, read_worst_step  # noqa: PLC0415
        from memlog.trace import exporters  # noqa: PLC0415

        if size > MAX_TRACE_BYTES:
            return
        event, trace = read_worst_step(self._run)
        step = "a step that did not end" if event.step is None else f"step {event.step}"
        document = exporters.flame_graph(trace, step)
        page = exporters.flame_page(document)
        if page is not None:
            self._publish(keep_text(self._run, page, PAGE, KIND))
        with TemporaryDirectory() as folder:
            file = exporters.write_json(document, Path(folder) / FLAME_GRAPH)
            self._publish(keep(self._run, file, FLAME_GRAPH, KIND))
        logger.info("saved the flame graph of the worst of the traced steps (%s)", step)
