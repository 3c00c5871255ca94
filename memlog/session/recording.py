"""A run being recorded: its parts are started here, and stopped when it ends."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from memlog._internal import fork
from memlog._internal.diagnostics import Diagnostics
from memlog.autolog.optimizer_steps import listen
from memlog.autolog.run_detector import RunDetector
from memlog.autolog.step_recorder import BatchRecorder, run_event
from memlog.bus import EventBus
from memlog.console import Console
from memlog.events import (
    Alert,
    End,
    Epoch,
    Evaluation,
    Event,
    Phase,
    Recorded,
    Scope,
    Status,
    now_us,
)
from memlog.events import Health as HealthEvent
from memlog.journal import JournalWriter, new_run
from memlog.journal.delivery_state import UploadState
from memlog.oom.errors import describe, failed_allocation
from memlog.oom.observer import AllocatorWatch
from memlog.session.exit_messages import print_lost_events
from memlog.session.growth_watch import GrowthWatch
from memlog.session.labels import Labels
from memlog.session.peak_watch import PeakWatch
from memlog.session.phases import Phases
from memlog.session.rank import SessionRank
from memlog.session.run_delivery import RunDelivery
from memlog.session.run_lines import RunLines
from memlog.settings import Settings
from memlog.sink import (
    Backend,
    Sink,
    backends_to_look_in,
    writes_in_process,
)

if TYPE_CHECKING:
    from memlog.journal.artifacts import Names
    from memlog.session.alert_judging import AlertJudge
    from memlog.tracer.schedule.step_scheduler import PeriodicTracer

AlertCallback: TypeAlias = Callable[[Alert], object]

_RESERVE = 4 * 1024**2
"""Bytes of address space, never touched, that are released when a run ends. So memlog can still describe the
end when memory has run out."""
HELPER_CHECK_INTERVAL_NS = 1_000_000_000
"""Nanoseconds between checks of the helper process."""


class Recording:
    """Parts of a session that records.

    Args:
        settings: Settings that resulted from `init`'s arguments.
        diagnostics: Counts errors in this process.
        sinks: Sinks that were passed as objects.
        model: Its size is recorded once.
        on_alert: Called with every alert.
        on_in_process: Called when memlog begins to write to a user's run in this process.

    Attributes:
        run: The run's folder.
        batches: Publishes the batch events.
        phases: The phases that are open.
        runs: The tracker's runs that are joined.
        generation: `memlog._internal.fork.generation` of the process that records.

    Raises:
        MemlogError: See `init`.
    """

    def __init__(
        self,
        settings: Settings,
        diagnostics: Diagnostics,
        sinks: Sequence[Sink],
        model: Any,
        on_alert: AlertCallback | None = None,
        on_in_process: Callable[[], object] = lambda: None,
    ) -> None:
        self.generation = fork.generation
        self._closed = False
        self._diagnostics = diagnostics
        self._rank = SessionRank(settings, diagnostics)
        self._settings = self._rank.settings
        self._on_alert = on_alert
        self._names: Names | None = None
        self._helper_check_due = 0
        self._labels = Labels(diagnostics)
        self._peaks = PeakWatch()
        self.phases = Phases(self.publish, diagnostics)
        self._published = False
        self._reserve: bytearray | None = bytearray(_RESERVE)
        with ExitStack() as undo:
            backends = backends_to_look_in(settings.backends)
            self._begin(backends, sinks, model, on_in_process, undo)
            self._lines.begun()
            self._undo = undo.pop_all()

    def _begin(
        self,
        backends: Mapping[str, Backend],
        sinks: Sequence[Sink],
        model: Any,
        on_in_process: Callable[[], object],
        undo: ExitStack,
    ) -> None:
        """Start the parts. ``undo`` gets a function that stops each part if a later one fails."""
        settings, diagnostics = self._settings, self._diagnostics
        begun_us = now_us()
        self.run = new_run(Path(settings.directory))
        undo.callback(shutil.rmtree, self.run.path, ignore_errors=True)
        self._journal = JournalWriter(
            self.run.path,
            run=self.run.id,
            role="trainer",
            begun_us=begun_us,
            initial_step=settings.initial_step,
            segment_bytes=settings.segment_size,
            limit=settings.journal_limit,
            diagnostics=diagnostics,
        )
        undo.callback(self._journal.close)
        self._bus = EventBus(diagnostics)
        self._bus.subscribe(self._journal.append)
        self._console: Console | None = None
        if settings.verbose_batches or settings.alerts:
            self._console = Console(settings.verbose_batches)
            with diagnostics.contained("printing"):
                self._console.announce()
            self._bus.subscribe(self._console)
        self._alert_judge: AlertJudge | None = None
        if settings.alerts and self._console is not None:
            # Imported here because it is needed only with alert rules.
            from memlog.session.alert_judging import AlertJudge  # noqa: PLC0415

            self._alert_judge = AlertJudge(
                settings.alerts,
                self._bus,
                diagnostics,
                self._console,
                self._on_alert,
                lambda: self.batches.host.rss_file,
            )
            undo.callback(self._alert_judge.close)
        in_process = [name for name, found in backends.items() if writes_in_process(found)]
        self._delivery = RunDelivery(
            self.run, settings, self._journal, diagnostics, in_process, sinks
        )
        self._helper = self._delivery.helper
        undo.callback(self._helper.abandon)
        listener = None if self._alert_judge is None else self._alert_judge.listener
        self._delivery.start_helper(begun_us, listener, self._rank)
        for writer in self._delivery.writers.values():
            self._bus.subscribe(writer.receive)
        self._lines = RunLines(self.run, self._rank, diagnostics)
        self._bus.subscribe(self._peaks)
        self.runs = RunDetector(
            backends,
            self._journal,
            self._helper.send,
            diagnostics,
            self._delivery.writers,
            on_in_process,
            self._lines.joined,
            lambda: self._rank.may_deliver,
            lambda name: UploadState.load(self.run, name).own_run is not None,
        )
        self._bus.publish(run_event(settings, begun_us))
        self.batches = BatchRecorder(
            settings,
            self._bus,
            self._journal,
            self.runs,
            diagnostics,
            model,
            self._rank.look_again,
        )
        self.batches.check_helper = self._check_helper_if_due
        undo.callback(self.batches.close)
        self._tracer: PeriodicTracer | None = None
        self._growth = GrowthWatch(
            self._bus,
            diagnostics,
            self._on_alert,
            lambda: (self.batches.host.rss_anon, self.batches.host.rss_shared),
            lambda: self._tracer is not None and self._tracer.busy,
            layers=settings.layers,
        )
        self.batches.after_step = self._after_step
        self._allocator = AllocatorWatch(
            self._bus.publish,
            lambda: self.batches.last_step,
            diagnostics,
            self.run,
            lambda: self._tracer is not None and self._tracer.tracing,
        )
        self._bus.subscribe(self._allocator)
        undo.callback(self._allocator.stop)
        self._bus.subscribe(self.phases.receive)
        if settings.layers:
            self._tracer = self._begin_tracing(settings.budget, model)
            undo.callback(self._tracer.finish)
        self._autolog = listen(self.batches.optimizer_stepped)
        undo.callback(self._autolog.remove)
        self.runs.resolve_active_runs()
        if self._rank.may_deliver:
            # Last, because a delivery that has begun can't be undone.
            self._delivery.start_threads()
            for thread in self._delivery.threads:
                undo.callback(thread.complete)

    def abandon(self) -> None:
        """Stop every part and delete the run's folder, because `init` was interrupted before it returned."""
        self._undo.close()

    def publish(self, event: Event) -> None:
        """Publish an event on the bus, if this is the process that began the session."""
        if fork.generation == self.generation:
            self.runs.join_new_runs(self.batches.next_step)
            if isinstance(event, (Epoch, Evaluation)):
                self.batches.parameters.publish_without_step()
            elif isinstance(event, (Scope, Recorded)):
                event = self._labels.with_step(event, self.batches.last_step)
            elif isinstance(event, Phase):
                event = self._labels.with_step(event, self.batches.last_or_first_step)
            self._published = True
            self._bus.publish(event)
            self._check_helper_if_due(time.perf_counter_ns())

    def _check_helper_if_due(self, now_ns: int) -> None:
        """Check the helper process about once a second, because no event reports its end."""
        if now_ns >= self._helper_check_due:
            self._helper_check_due = now_ns + HELPER_CHECK_INTERVAL_NS
            with self._diagnostics.contained("checking the helper process"):
                helper, process = self._helper, self._helper.current.process
                ended = process is not None and not helper.is_away and process.poll() is not None
                if (ended or helper.changed) and helper.look():
                    self.batches.health.publish(self.batches.last_step)
                stepped = self.batches.last_step is not None
                self._delivery.lead_if_lowest(self._rank, has_stepped=stepped)
                self._lines.look()

    def _after_step(self, step: int) -> None:
        """Give a step's end to the growth search and the tracer, which never look into the same step."""
        self._growth.after_step(step)
        if self._tracer is not None:
            self._tracer.after_step(step, may_trace=not self._growth.searching)

    def _begin_tracing(self, budget: float, model: Any) -> PeriodicTracer:
        from memlog.tracer.schedule.step_scheduler import PeriodicTracer  # noqa: PLC0415 - needed only for tracing

        tracer = PeriodicTracer(
            self.run.worst_step, self._bus.publish, self._diagnostics, model, budget
        )
        self._bus.subscribe(tracer.larger_steps)
        self.batches.health.tracing_cost = tracer.costs.seconds
        return tracer

    def snapshot(self) -> None:
        """Trace the next step."""
        if fork.generation == self.generation:
            if self._tracer is None:
                self._tracer = self._begin_tracing(0.0, None)
            self._tracer.want()

    def save_artifact(
        self, path: str | os.PathLike[str], kind: str, name: str | None
    ) -> Path | None:
        """Save a file in the run's folder and publish its event."""
        # Imported here because most trainers save no file.
        from memlog.journal.artifacts import (  # noqa: PLC0415
            Names,
            keep,
            not_kept,
            renamed,
        )

        if fork.generation != self.generation:
            return None
        if self._names is None:
            self._names = Names()
        try:
            file = Path(path)
            artifact = keep(self.run, file, name, kind, self._names)
        except Exception as error:  # noqa: BLE001 - the trainer's step must not fail on a report
            self._diagnostics.drop_each("artifact_not_kept", not_kept(path, error))
            return None
        message = renamed(artifact, file.name if name is None else name, kind)
        if message is not None:
            self._diagnostics.say_once(message, message)
        self.publish(artifact)
        return self.run.path / artifact.path

    def claim_steps(self, *, only_first: bool) -> None:
        """Let the caller count the steps; ``only_first``: a monitor, which prints its own lines."""
        self.batches.claim(only_first=only_first)
        if only_first and self._console is not None:
            self._console.silence()

    def finish(self, status: Status, timeout: float, error: BaseException | None = None) -> None:
        """End the recording in the trainer's process and leave further delivery to the helper process.

        Args:
            status: How the run ended.
            timeout: Most seconds to wait.
            error: Exception that ended the run, or that is being raised.
        """
        if fork.generation != self.generation:
            return  # a forked copy: the run belongs to the parent process
        end, health = self._close(status, error)
        self._closed = True
        self._delivery.finish(end, health, timeout)
        verdict = self._growth.verdict(self.run)
        limit = self._growth.host_limit
        self._lines.print_end(verdict, self._peaks, limit, failed=status != "finished")

    def _close(self, status: Status, error: BaseException | None) -> tuple[End, HealthEvent]:
        """Stop every part, and return the run's last events."""
        self._reserve = None
        contained = self._diagnostics.contained
        with contained("removing the optimizer hooks"):
            self._autolog.remove()
        self._allocator.stop()
        if self._tracer is not None:
            with contained("ending the tracing of steps"):
                self._tracer.finish(failed=status != "finished")
        self._growth.finish(self.batches.last_step)
        self._publish_failed_allocation(error)
        self.phases.end_all()
        with contained("looking for the ranks' lowest one"):
            stepped = self.batches.last_step is not None
            if self._delivery.lead_if_lowest(self._rank, has_stepped=stepped, is_final=True):
                self.runs.join_new_runs(self.batches.next_step)
        health, end = self._publish_summary(status), End(now_us(), status)
        self._bus.publish(end)
        if self._rank.may_deliver:
            self.runs.connect()
        with contained("closing the journal"):
            self._journal.close()
        with contained("closing the host's memory figures"):
            self.batches.close()
        print_lost_events(self.run, self._diagnostics)
        return end, health

    def finish_after_interruption(self, status: Status) -> None:
        """Send the helper process the end of the run, if an interruption kept `finish` from doing so.

        The journal lacks the end then. Ctrl-C and other signals' handlers can raise at any call.
        """
        if self._closed or fork.generation != self.generation:
            return
        with self._diagnostics.contained("removing the optimizer hooks"):
            self._autolog.remove()
        with self._diagnostics.contained("closing the journal"):
            self._journal.close()
        with self._diagnostics.contained("sending the end of the run"):
            self._delivery.send_end(End(now_us(), status), _empty_health(), 0)
        self._delivery.print_undelivered("at work", 0.1)

    def _publish_summary(self, status: Status) -> HealthEvent:
        """Publish memlog's own cost and errors, and print the messages about the whole run."""
        health = _empty_health()
        with self._diagnostics.contained("publishing the run's health"):
            self._helper.look_at_last()
            unjudged: Mapping[str, str] = {}
            if self._alert_judge is not None:
                unjudged = self._alert_judge.print_unjudged_rules(self._helper.is_away)
            health = self.batches.health.publish(self.batches.last_step, unjudged)
            if status == "finished" and not self._published:
                self.batches.warn_if_no_steps()
        return health

    def _publish_failed_allocation(self, error: BaseException | None) -> None:
        """Publish an event if memory ran out. The helper process makes a report of it."""
        with self._diagnostics.contained("describing what ended the run"):
            failed = failed_allocation(error)
            if failed is not None and not self._allocator.has_published(failed):
                self._bus.publish(describe(failed, self.batches.last_step, error))


def _empty_health() -> HealthEvent:
    return HealthEvent(now_us(), None, None, 0.0, {}, {})
