"""Parts of a recording. They are started here, in order. If one can't start, all are stopped."""

from __future__ import annotations

import shutil
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
from memlog.events import Alert, Event, now_us
from memlog.in_process.writer import InProcessWriter
from memlog.journal import JournalWriter, new_run
from memlog.journal.delivery_state import UploadState
from memlog.oom.observer import AllocatorWatch
from memlog.session.growth_watch import GrowthWatch
from memlog.session.peak_watch import PeakWatch
from memlog.session.phases import Phases
from memlog.session.rank import SessionRank
from memlog.session.run_delivery import RunDelivery
from memlog.session.run_messages import RunMessages
from memlog.settings import Settings
from memlog.sink import Backend, Sink, backends_to_look_in, writes_in_process

if TYPE_CHECKING:
    from memlog.session.alert_judging import AlertJudge
    from memlog.tracer.schedule.step_scheduler import StepScheduler

AlertCallback: TypeAlias = Callable[[Alert], object]

HELPER_CHECK_INTERVAL_NS = 1_000_000_000
"""Nanoseconds between checks of the helper process."""


class RecordingParts:
    """Parts of a recording, and the functions that connect them.

    ``sinks`` holds only the sinks that the user passed as objects. memlog calls ``publish`` with each phase
    that has ended, ``on_alert`` with every alert, and ``on_in_process`` when it begins to write to a user's
    run from this process. If ``generation`` differs from `memlog._internal.fork.generation`, this process is
    a fork of the process that records.

    Raises:
        MemlogError: See `init`.
    """

    def __init__(
        self,
        settings: Settings,
        diagnostics: Diagnostics,
        sinks: Sequence[Sink],
        model: Any,
        publish: Callable[[Event], object],
        on_alert: AlertCallback | None,
        on_in_process: Callable[[], object],
    ) -> None:
        self.generation = fork.generation
        self._diagnostics = diagnostics
        self._rank = SessionRank(settings, diagnostics)
        self._settings = self._rank.settings
        self._on_alert = diagnostics.contained_callback("on_alert", on_alert)
        self._helper_check_due = 0
        self._peaks = PeakWatch()
        self.phases = Phases(publish, diagnostics)
        with ExitStack() as undo:
            backends = backends_to_look_in(settings.backends)
            self._begin(backends, sinks, model, on_in_process, undo)
            self._messages.begun()
            self._undo = undo.pop_all()

    def _begin(
        self,
        backends: Mapping[str, Backend],
        sinks: Sequence[Sink],
        model: Any,
        on_in_process: Callable[[], object],
        undo: ExitStack,
    ) -> None:
        """Start the parts. For each started part, add to ``undo`` the function that stops the part."""
        begun_us = now_us()
        self._begin_journal(begun_us, undo)
        self._begin_alerts(undo)
        self._begin_delivery(backends, sinks, begun_us, undo)
        self._messages = RunMessages(self.run, self._rank, self._diagnostics)
        self._bus.subscribe(self._peaks)
        self.runs = RunDetector(
            backends,
            self._journal,
            self._helper.send,
            self._diagnostics,
            self._writers,
            on_in_process,
            self._messages.joined,
            lambda: self._rank.may_deliver,
            lambda name: UploadState.load(self.run, name).own_run is not None,
        )
        self._bus.publish(run_event(self._settings, begun_us))
        self._begin_steps(model, undo)
        self._begin_watches(model, undo)
        self._autolog = listen(self.batches.optimizer_stepped)
        undo.callback(self._autolog.remove)
        self.runs.resolve_active_runs()
        if self._rank.may_deliver:
            # Last, because a delivery that has begun can't be undone.
            self._delivery.start_threads()
            for thread in self._delivery.threads:
                undo.callback(thread.complete)

    def _begin_journal(self, begun_us: int, undo: ExitStack) -> None:
        """Create the run's folder, its journal and the event bus. The journal subscribes first."""
        settings = self._settings
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
            diagnostics=self._diagnostics,
        )
        undo.callback(self._journal.close)
        self._bus = EventBus(self._diagnostics)
        self._bus.subscribe(self._journal.append)

    def _begin_alerts(self, undo: ExitStack) -> None:
        """Begin to print batch lines if the settings ask for it. Begin to judge alert rules if any exist."""
        settings = self._settings
        self._console: Console | None = None
        self._alert_judge: AlertJudge | None = None
        if settings.verbose_batches or settings.alerts:
            self._console = Console(settings.verbose_batches)
            with self._diagnostics.contained("printing"):
                self._console.announce()
            self._bus.subscribe(self._console)
        if settings.alerts and self._console is not None:
            from memlog.session.alert_judging import AlertJudge  # noqa: PLC0415 - only with alert rules

            self._alert_judge = AlertJudge(
                settings.alerts,
                self._bus,
                self._diagnostics,
                self._console,
                self._on_alert,
                lambda: self.batches.host.rss_file,
            )
            undo.callback(self._alert_judge.close)

    def _begin_delivery(
        self,
        backends: Mapping[str, Backend],
        sinks: Sequence[Sink],
        begun_us: int,
        undo: ExitStack,
    ) -> None:
        self._writers = {
            name: InProcessWriter(self.run, name, self._bus.subscribe, self._diagnostics)
            for name, backend in backends.items()
            if writes_in_process(backend)
        }
        self._delivery = RunDelivery(
            self.run, self._settings, self._journal, self._diagnostics, self._writers, sinks
        )
        self._helper = self._delivery.helper
        undo.callback(self._helper.abandon)
        listener = None if self._alert_judge is None else self._alert_judge.listener
        self._delivery.start_helper(begun_us, listener, self._rank)

    def _begin_steps(self, model: Any, undo: ExitStack) -> None:
        self.batches = BatchRecorder(
            self._settings,
            self._bus,
            self._journal,
            self.runs,
            self._diagnostics,
            model,
            self._rank.look_again,
        )
        self.batches.check_helper = self._check_helper_if_due
        self.batches.after_step = self._after_step
        undo.callback(self.batches.host.close)

    def _begin_watches(self, model: Any, undo: ExitStack) -> None:
        """Watch memory growth, failed allocations and phases. Trace steps if the setting ``layers`` is on."""
        self._scheduler: StepScheduler | None = None
        self._growth = GrowthWatch(
            self._bus,
            self._diagnostics,
            self._on_alert,
            lambda: (self.batches.host.rss_anon, self.batches.host.rss_shared),
            lambda: self._scheduler is not None and self._scheduler.busy,
            layers=self._settings.layers,
        )
        self._allocator = AllocatorWatch(
            self._bus.publish,
            lambda: self.batches.last_step,
            self._diagnostics,
            self.run,
            lambda: self._scheduler is not None and self._scheduler.tracing,
        )
        self._bus.subscribe(self._allocator)
        undo.callback(self._allocator.stop)
        self._bus.subscribe(self.phases.receive)
        if self._settings.layers:
            self._scheduler = self._begin_tracing(self._settings.budget, model)
            undo.callback(self._scheduler.finish)

    def abandon(self) -> None:
        """Stop every part and delete the run's folder, because `init` was interrupted before it returned."""
        self._undo.close()

    def _check_helper_if_due(self, now_ns: int) -> None:
        """Check about once a second whether the helper process has ended, because no event reports that."""
        if now_ns >= self._helper_check_due:
            self._helper_check_due = now_ns + HELPER_CHECK_INTERVAL_NS
            with self._diagnostics.contained("checking the helper process"):
                helper, process = self._helper, self._helper.current.process
                ended = process is not None and not helper.is_away and process.poll() is not None
                if (ended or helper.changed) and helper.look():
                    self.batches.health.publish(self.batches.last_step)
                stepped = self.batches.last_step is not None
                self._delivery.lead_if_lowest(self._rank, has_stepped=stepped)
                self._messages.look()

    def _after_step(self, step: int) -> None:
        """Pass a step's end to the growth search and to the tracer. While the search runs, trace no step."""
        self._growth.after_step(step)
        if self._scheduler is not None:
            self._scheduler.after_step(step, may_trace=not self._growth.searching)

    def _begin_tracing(self, budget: float, model: Any) -> StepScheduler:
        from memlog.tracer.schedule.step_scheduler import StepScheduler  # noqa: PLC0415 - needed only for tracing

        scheduler = StepScheduler(
            self.run.worst_step, self._bus.publish, self._diagnostics, model, budget
        )
        self._bus.subscribe(scheduler.larger_steps)
        self.batches.health.tracing_cost = scheduler.costs.seconds
        return scheduler
