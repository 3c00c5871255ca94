"""Pages that are saved as files of a run: its report, and the flame graph of its worst traced step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.events import REPORT_FILE, REPORT_KIND, Artifact, End, Event, now_us
from memlog.journal import Binding, JournalWriter, RunDirectory

if TYPE_CHECKING:
    from memlog.reports.page.facts import RunReader


logger = logging.getLogger("memlog.delivery")

_LONG = 5_000
"""Number of steps after which a run counts as long. During a long run, the helper already reads the journal
for the report, so that making the report at the end takes less time."""
_PREPARE_AFTER = 1.0
"""Seconds after the first step. Then the helper imports what makes the report, so that a report for a user's
run that ends takes less time. Earlier, the import would delay the first samples."""
_EACH = 500
"""Number of events to read at once. Reading takes some milliseconds, in which the helper takes no sample."""


def keep_report(
    run: RunDirectory,
    name: str,
    reader: RunReader | None = None,
    end: End | None = None,
) -> Artifact | None:
    """Make a run's report and save it in the run's folder.

    ``reader`` is a reader that may have read the journal's beginning; ``None``: a new reader. ``end`` is the
    run's end, if the journal has none yet.

    Returns:
        The event that describes the file; ``None`` if the run has no memory readings.

    Raises:
        OSError: The journal can't be read, or the file can't be written.
    """
    # Imported here: only the end of a run needs them, and they would delay the helper's first sample.
    from memlog.journal.artifacts import keep_text  # noqa: PLC0415
    from memlog.reports.page import html  # noqa: PLC0415
    from memlog.reports.page.facts import RunReader  # noqa: PLC0415

    reader = reader or RunReader(run)
    reader.read()
    if not reader.series.has_readings:
        return None
    return keep_text(run, html(reader, end=end), name, REPORT_KIND)


class HelpersReport:
    """Report that the helper process makes when the run ends. Its errors are counted, and never raised."""

    def __init__(
        self, run: RunDirectory, publish: Callable[[Event], object], diagnostics: Diagnostics
    ) -> None:
        self._run = run
        self._publish = publish
        self._diagnostics = diagnostics
        self._reader: RunReader | None = None
        self._is_prepared = False
        self._prepare_at = 0.0

    def look(self, step: int | None) -> None:
        """Prepare for a quick report. ``step`` is the run's newest step.

        Import what makes the report, and if the run is long, read some events now.
        """
        if step is not None and not self._is_prepared:
            self._prepare()
        if step is None or step < _LONG:
            return
        with self._diagnostics.contained("reading ahead for the report"):
            self._begun_reader().read(_EACH)

    def _prepare(self) -> None:
        """Import what makes the report, `_PREPARE_AFTER` seconds after the first step."""
        now = time.monotonic()
        self._prepare_at = self._prepare_at or now + _PREPARE_AFTER
        if now >= self._prepare_at:
            self._is_prepared = True
            with self._diagnostics.contained("preparing for the report"):
                from memlog.reports.page import facts, html  # noqa: F401, PLC0415 - it takes 0.2 s

    def publish(self) -> None:
        begun = time.monotonic()
        with self._diagnostics.contained("making the report"):
            artifact = keep_report(self._run, REPORT_FILE, self._begun_reader())
            if artifact is not None:
                self._publish(artifact)
                logger.info("made the run's report in %.2f s", time.monotonic() - begun)

    def cache_summary(self) -> None:
        """Cache the run's summary for ``memlog show``, if the journal was read for a report.

        To be called after the last event of all processes.
        """
        with self._diagnostics.contained("caching the run's summary"):
            if self._reader is not None:
                self._reader.cache_summary()

    def publish_for(self, run_id: str, end: End) -> None:
        """Publish a report for a user's run that begins to end, while memlog's run may go on.

        ``run_id`` is the run's id in the tracker. In memlog's folder, the report has a file of its own, so
        that a later report does not replace it while a tracker's client reads it.
        """
        with self._diagnostics.contained("making the report"):
            artifact = keep_report(self._run, f"report-{run_id}.html", self._reader, end)
            if artifact is not None:
                self._publish(msgspec.structs.replace(artifact, name=REPORT_FILE))

    def _begun_reader(self) -> RunReader:
        if self._reader is None:
            from memlog.reports.page.facts import RunReader  # noqa: PLC0415

            self._reader = RunReader(self._run)
        return self._reader


def make_later(run: RunDirectory, alerts_fd: int | None) -> None:
    """Start a child process that makes the report of a run that has ended. Do not wait for the process.

    The child keeps the locks that the calling process holds. It closes its copy of ``alerts_fd``, because the
    training process reads the pipe for alerts until all copies are closed.

    Raises:
        OSError: No process can be started.
    """
    if os.fork() != 0:
        return
    try:
        if alerts_fd is not None:
            os.close(alerts_fd)
        diagnostics = Diagnostics()
        # The user may have deleted the folder.
        if run.path.exists():
            with diagnostics.contained("making the report"):
                with late_events(run, diagnostics) as bus:
                    report = HelpersReport(run, bus.publish, diagnostics)
                    report.publish()
                report.cache_summary()
        logging.shutdown()
    finally:
        # Without Python's exit handlers, which belong to the parent process.
        os._exit(0)


@contextmanager
def late_events(run: RunDirectory, diagnostics: Diagnostics) -> Iterator[EventBus]:
    """Context manager with a bus for events of a run that is over.

    This process writes the events to a journal file of its own.

    Raises:
        UnwritableDirectoryError: The run's folder can't be written.
    """
    header = run.trainer()
    journal = JournalWriter(
        run.path,
        run=run.id,
        role="helper",
        begun_us=header.begun_us if header else now_us(),
        initial_step=header.initial_step if header else 0,
        diagnostics=diagnostics,
    )
    for backend, binding in _last_bindings(run).items():
        journal.bind(backend, binding)
    bus = EventBus(diagnostics)
    bus.subscribe(journal.append)
    yield bus
    journal.close()


def _last_bindings(run: RunDirectory) -> dict[str, Binding]:
    """Return, for each backend, the tracker's run that the trainer's last events belong to."""
    bindings: dict[str, Binding] = {}
    for file in run.files("trainer"):
        for header in file.headers():
            bindings = header.bindings
    return bindings


FLAME_GRAPH = "worst-step.speedscope.json.gz"
FLAME_GRAPH_PAGE = "worst-step.html"
"""HTML page of the flame graph. Trackers can't show `FLAME_GRAPH`, because that file is compressed."""
_FLAME_GRAPH_KIND = "flamegraph"


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
            status = path.stat()
        except OSError:
            return  # no step has been traced yet
        if status.st_mtime_ns != self._seen:
            self._seen = status.st_mtime_ns
            with self._diagnostics.contained("making a flame graph"):
                self._draw(status.st_size)

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
            self._publish(keep_text(self._run, page, FLAME_GRAPH_PAGE, _FLAME_GRAPH_KIND))
        with TemporaryDirectory() as folder:
            file = exporters.write_json(document, Path(folder) / FLAME_GRAPH)
            self._publish(keep(self._run, file, FLAME_GRAPH, _FLAME_GRAPH_KIND))
        logger.info("saved the flame graph of the worst of the traced steps (%s)", step)
