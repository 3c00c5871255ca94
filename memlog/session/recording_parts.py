"""Parts of a recording. They are started here, in order. If one can't start, all are stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog.autolog.optimizer_steps import listen
from memlog.autolog.run_detector import RunDetector
from memlog.autolog.saved_state import copying_libraries
from memlog.autolog.step_recorder import BatchRecorder, run_event
from memlog.bus import EventBus
from memlog.console import Console
from memlog.delivery.helper.protocol import Settling
from memlog.events import Alert, Batch, Device, Event, OutOfMemory, Status, Trace, now_us
from memlog.inputs.step_inputs import LoaderWatch
from memlog.inputs.watch import StepInputsWatch
from memlog.journal import JournalWriter, new_run
from memlog.journal.delivery_state import UploadState
from memlog.oom.observer import AllocatorWatch
from memlog.probes.machine import host_free
from memlog.session.exit import RunMessages
from memlog.session.helper_requests import HelperRequests
from memlog.session.rank import SessionRank
from memlog.session.run_delivery import RunDelivery
from memlog.session.unmarked_phases import UnmarkedPhases
from memlog.settings import Settings
from memlog.sink import (
    WEBHOOK,
    Backend,
    Sink,
    backends_to_look_in,
    load_backend,
    writes_in_process,
)

if TYPE_CHECKING:
    from memlog.delivery.helper.protocol import AlertListener
    from memlog.in_process.writer import InProcessWriter
    from memlog.session.phases import Phases
    from memlog.tracer.schedule.step_scheduler import StepScheduler

AlertCallback: TypeAlias = Callable[[Alert], object]

HELPER_CHECK_INTERVAL_NS = 1_000_000_000
"""Nanoseconds between checks of the helper process."""


class RecordingParts:
    """Parts of a recording, and the functions that connect them.

    ``sinks`` holds only the sinks that the user passed as objects. memlog calls ``publish`` with each phase
    that has ended, ``on_alert`` with every alert, and ``on_in_process`` when it begins to write to a user's
    run from this process. When a user's run begins to end, memlog calls ``settle`` with the backend's
    name, the run's id and the status. If ``generation`` differs from
    `memlog._internal.processes.generation`, this process is a fork of the process that records.

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
        settle: Callable[[str, str, Status], Settling | None],
    ) -> None:
        self._settle = settle
        self.generation = processes.generation
        self._diagnostics = diagnostics
        self._rank = SessionRank(settings, diagnostics)
        self._settings = self._rank.settings
        self._on_alert = diagnostics.contained_callback("on_alert", on_alert)
        self._publish_phase = publish
        self._phases: Phases | None = None
        self._scheduler: StepScheduler | None = None
        with ExitStack() as undo:
            backends = backends_to_look_in(settings.backends)
            if self._settings.alert_webhook:
                backends[WEBHOOK] = load_backend(WEBHOOK)
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
            self._before_end,
            self._settings.initial_step,
        )
        undo.callback(self.runs.watch_no_ends)
        self._bus.publish(run_event(self._settings, begun_us))
        self._begin_steps(model, undo)
        self._begin_watches(model, undo)
        self._autolog = listen(self.batches.optimizer_stepped)
        self._autolog.threads.on_other_step = self.batches.other_thread_stepped
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
        undo.callback(_remove, self.run.path)
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
        """Begin to print batch lines if the settings ask for it, and to receive the helper's requests."""
        settings = self._settings
        self._console: Console | None = None
        if settings.verbose_batches or settings.alerts:
            self._console = Console(settings.verbose_batches)
            with self._diagnostics.contained("printing"):
                self._console.announce()
            if settings.verbose_batches:
                self._bus.subscribe(self._console, Batch)
        self._requests = HelperRequests(
            self._bus,
            self._diagnostics,
            settings.alerts,
            self._console,
            self._on_alert,
            lambda: self._scheduler is not None and self._scheduler.busy,
            lambda: self.batches.last_or_first_step,
            layers=settings.layers,
        )
        undo.callback(self._requests.close)
        self._listener: AlertListener | None = None
        if settings.alerts:
            with self._diagnostics.contained("listening for the helper process's alerts"):
                self._listener = self._requests.listener()
            if self._listener is not None:
                undo.callback(self._listener.close)

    def _begin_delivery(
        self,
        backends: Mapping[str, Backend],
        sinks: Sequence[Sink],
        begun_us: int,
        undo: ExitStack,
    ) -> None:
        self._writers: dict[str, InProcessWriter] = {}
        for name, backend in backends.items():
            if writes_in_process(backend):
                # Imported here: most backends write from the helper process.
                from memlog.in_process.writer import InProcessWriter  # noqa: PLC0415

                self._writers[name] = InProcessWriter(
                    self.run,
                    name,
                    self._bus.subscribe,
                    self._diagnostics,
                    partial(self._settle_written, name),
                    partial(self._number_first_row, name),
                )
        self._delivery = RunDelivery(
            self.run, self._settings, self._journal, self._diagnostics, self._writers, sinks
        )
        self._helper = self._delivery.helper
        undo.callback(self._helper.abandon)
        self._delivery.start_helper(begun_us, self._listener, self._requests.reader, self._rank)

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
        undo.callback(self.batches.host.close)
        self.batches.check_helper = self._check_helper_if_due
        self._follow_steps()
        self._requests.searches.follow_steps = self._follow_steps
        self.batches.requests = self._requests.reader

    def _begin_watches(self, model: Any, undo: ExitStack) -> None:
        """Watch memory growth, failed allocations and phases. Trace steps if the setting ``layers`` is on."""
        self._allocator = AllocatorWatch(
            self._bus.publish,
            lambda: self.batches.last_step,
            self._diagnostics,
            self.run,
            lambda: self._scheduler is not None and self._scheduler.tracing,
        )
        with self._diagnostics.contained("reading how libraries save"):
            copying_libraries()  # it reads files, which no step may do
        self._loaders = LoaderWatch(self._diagnostics)
        undo.callback(self._loaders.stop)
        self._loaders.begin()
        self._inputs = self.batches.inputs = StepInputsWatch(
            self._bus.publish,
            self._diagnostics,
            self._settings.every,
            _own_free,
            self._loaders.lengths,
        )
        self._bus.subscribe(self._inputs.device_found, Device)
        self._bus.subscribe(self._inputs.step_traced, Trace)
        self._bus.subscribe(self._allocator, Device)
        self._ran_out = False
        self._bus.subscribe(self._note_failure, OutOfMemory)
        undo.callback(self._allocator.stop)
        self._allocator.begin()
        self._unmarked = UnmarkedPhases(
            lambda: self.phases,
            lambda: self.batches.last_step,
            lambda: self.batches.claimed,
            self._diagnostics,
        )
        undo.callback(self._unmarked.stop)
        self._unmarked.begin()
        if self._settings.layers:
            # Saves and evaluations need it: with layers, nothing is imported after `init`.
            import memlog.session.phases  # noqa: F401, PLC0415

            # A version of torch can lack a private part that tracing needs.
            with self._diagnostics.contained("loading the tracer (no step is traced)"):
                self._scheduler = self._begin_tracing(self._settings.budget, model)
                undo.callback(self._scheduler.finish)

    def _note_failure(self, _event: Event) -> None:
        self._ran_out = True

    def _settle_written(self, backend: str, run_id: str) -> Settling | None:
        """Settle the verdict before a user's run ends, to which this process writes."""
        return self._settle(backend, run_id, "finished")

    def _number_first_row(
        self, backend: str, run_id: str, number: int | None, step: int | None
    ) -> int:
        return self.runs.number_first_row(backend, run_id, number, step)

    def _before_end(self, backend: str, run_id: str, status: Status) -> None:
        """Settle the verdict before a user's run ends, and wait until the tracker has it."""
        with self._diagnostics.contained("settling the verdict"):
            settling = self._settle(backend, run_id, status)
            if settling is not None:
                settling.wait()

    def abandon(self) -> None:
        """Stop every part and delete the run's folder, because `init` was interrupted before it returned."""
        self._undo.close()

    def _check_helper_if_due(self, now_ns: int) -> None:
        """Check about once a second whether the helper process has ended, because no event reports that."""
        if now_ns >= self.batches.helper_check_due:
            self.batches.helper_check_due = now_ns + HELPER_CHECK_INTERVAL_NS
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
        if self._requests.follows_steps:
            self._requests.after_step(step, self.batches.last)
        if self._scheduler is not None:
            self._scheduler.after_step(step, may_trace=not self._requests.searches.searching)
        elif not self._requests.follows_steps:
            self.batches.after_step = None  # `_follow_steps` sets it again

    @property
    def phases(self) -> Phases:
        """Phases of the program. Steps are read for them from the first phase on."""
        if self._phases is None:
            from memlog.session.phases import Phases  # noqa: PLC0415 - most programs mark no phases

            self._phases = Phases(self._publish_phase, self._diagnostics)
            self._bus.subscribe(self._phases.receive, Batch)
        return self._phases

    def _follow_steps(self) -> None:
        """Call `_after_step` after each step, because a search or the tracing of steps has begun."""
        self.batches.after_step = self._after_step

    def _begin_tracing(self, budget: float, model: Any) -> StepScheduler:
        from memlog.tracer.schedule.step_scheduler import StepScheduler  # noqa: PLC0415 - needed only for tracing

        scheduler = StepScheduler(
            self.run.worst_step, self._bus.publish, self._diagnostics, model, budget
        )
        self._bus.subscribe(scheduler.larger_steps)
        self._follow_steps()
        self._bus.subscribe(scheduler.allocation_failed, OutOfMemory)
        self.batches.health.tracing_cost = scheduler.costs.told
        return scheduler


def _own_free() -> int | None:
    """Return the bytes that this process can still take; ``None`` if unknown."""
    return host_free(os.getpid())


def _remove(folder: Path) -> None:
    import shutil  # noqa: PLC0415 - takes 2 ms, and only a failed `init` needs it

    shutil.rmtree(folder, ignore_errors=True)
