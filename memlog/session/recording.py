"""A run being recorded: where the parts are put together, and taken apart again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from memlog._internal import fork
from memlog._internal.diagnostics import Diagnostics
from memlog.autolog.optimizer_steps import listen
from memlog.autolog.run_detector import RunDetector
from memlog.autolog.step_recorder import BatchRecorder, run_event
from memlog.bus import EventBus
from memlog.console import Console
from memlog.delivery.in_process.writer import InProcessWriter
from memlog.events import Alert, End, Epoch, Evaluation, Event, Recorded, Scope, Status, now_us
from memlog.events import Health as HealthEvent
from memlog.journal import JournalWriter, new_run
from memlog.oom.errors import describe, failed_allocation
from memlog.oom.observer import AllocatorWatch
from memlog.session.exit_messages import Waiting, say_what_is_left, say_what_was_lost
from memlog.settings import Settings
from memlog.sink import LOCAL, Backend, Sink, backends_to_look_in, writes_in_process

if TYPE_CHECKING:
    from memlog.delivery.helper.alert_pipe import AlertListener
    from memlog.delivery.helper.client import Outcome
    from memlog.delivery.helper.protocol import Finish
    from memlog.delivery.helper.supervisor import SupervisedHelper
    from memlog.delivery.uploader.worker import UploadWorker
    from memlog.journal.artifacts import Names
    from memlog.session.alert_judging import Judging
    from memlog.tracer.schedule.step_scheduler import PeriodicTracer

AlertCallback: TypeAlias = Callable[[Alert], object]

_RESERVE = 4 * 1024**2
"""Bytes of address space, never touched, that are given back when a run ends: to say why, where there are
no others."""
LOOK_INTERVAL_NS = 1_000_000_000
"""Between looks at the helper process."""
MAX_LABELS = 50
"""Labels of blocks and points that get metrics of their own."""


class Recording:
    """The parts of a session that records.

    Args:
        settings: What `init` made of its arguments.
        diagnostics: Counts what goes wrong in this process.
        sinks: Sinks that were handed over as objects.
        model: Its size is recorded once.
        on_alert: Gets every alert.
        on_in_process: Called when memlog begins to write to a run of the user's in this process.

    Attributes:
        run: The run's folder.
        batches: Makes the batch events.

    Raises:
        MemlogError: see `init`.
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
        self._generation = fork.generation
        self._diagnostics = diagnostics
        self._settings = settings
        self._on_alert = on_alert
        self._names: Names | None = None
        self._look_due = 0
        self._labels: set[str] = set()
        self._published = False
        self._reserve: bytearray | None = bytearray(_RESERVE)
        backends = backends_to_look_in(settings.backends)
        with ExitStack() as undo:
            self._begin(backends, sinks, model, on_in_process, undo)
            self._undo = undo.pop_all()

    def _begin(
        self,
        backends: Mapping[str, Backend],
        sinks: Sequence[Sink],
        model: Any,
        on_in_process: Callable[[], object],
        undo: ExitStack,
    ) -> None:
        """Puts the parts together; ``undo`` gets what takes each apart again, should a later one fail."""
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
        self._judging: Judging | None = None
        if settings.alerts and self._console is not None:
            # Imported here: for those who have rules.
            from memlog.session.alert_judging import Judging  # noqa: PLC0415

            self._judging = Judging(
                settings.alerts,
                self._bus,
                diagnostics,
                self._console,
                self._on_alert,
                lambda: self.batches.rss_file,
            )
            undo.callback(self._judging.close)
        listener = None if self._judging is None else self._judging.listener
        self._helper = self._start_helper(settings, begun_us, listener, undo)
        self._writers = {
            name: InProcessWriter(self.run, name, diagnostics)
            for name, found in backends.items()
            if writes_in_process(found)
        }
        for writer in self._writers.values():
            self._bus.subscribe(writer.hear)
        self._run_detector = RunDetector(
            backends, self._journal, self._helper.tell, diagnostics, self._writers, on_in_process
        )
        self._bus.publish(run_event(settings, begun_us))
        self.batches = BatchRecorder(
            settings, self._bus, self._journal, self._run_detector, diagnostics, model
        )
        self.batches.look_around = self._look_around_if_due
        undo.callback(self.batches.close)
        self._tracer: PeriodicTracer | None = None
        self._allocator = AllocatorWatch(
            self._bus.publish,
            lambda: self.batches.last_step,
            diagnostics,
            self.run,
            lambda: self._tracer is not None and self._tracer.tracing,
        )
        self._bus.subscribe(self._allocator)
        undo.callback(self._allocator.stop)
        if settings.layers:
            self._tracer = self._begin_tracing(settings.budget, model)
            undo.callback(self._tracer.finish)
        self._autolog = listen(self.batches.optimizer_stepped)
        undo.callback(self._autolog.remove)
        self._run_detector.glance()
        self._threads: list[UploadWorker] = []
        if sinks:
            # Imported here: most trainers hold none.
            from memlog.delivery.uploader.user_sinks import deliver_to  # noqa: PLC0415

            # Last: what they have begun to deliver can't be taken back.
            self._threads = deliver_to(sinks, self.run, settings.backends, diagnostics)
            for thread in self._threads:
                undo.callback(thread.complete)

    def abandon(self) -> None:
        """Takes everything apart, the run's folder too: `init` was interrupted before anybody had the run."""
        self._undo.close()

    def publish(self, event: Event) -> None:
        """Puts an event on the bus, in the process that began the session."""
        if fork.generation == self._generation:
            self._run_detector.look()
            if isinstance(event, (Epoch, Evaluation)):
                self.batches.begin()
            elif isinstance(event, (Scope, Recorded)):
                event = self._placed(event)
            self._published = True
            self._bus.publish(event)
            self._look_around_if_due(time.perf_counter_ns())

    def _look_around_if_due(self, now_ns: int) -> None:
        """Sees about once a second to what no event tells of."""
        if now_ns >= self._look_due:
            self._look_due = now_ns + LOOK_INTERVAL_NS
            with self._diagnostics.contained("looking for the helper process"):
                if self._helper.look():
                    self.batches.publish_health()

    def _placed(self, event: Scope | Recorded) -> Scope | Recorded:
        """Says of the first labels at which step they were: trackers get no more metrics than of those."""
        if event.label not in self._labels:
            if len(self._labels) >= MAX_LABELS:
                self._diagnostics.drop(
                    "labels",
                    f"blocks and points have more than {MAX_LABELS} labels: trackers get those of the first "
                    f"{MAX_LABELS}, and the journal all",
                )
                return event
            self._labels.add(event.label)
        return msgspec.structs.replace(event, step=self.batches.last_step)

    def _begin_tracing(self, budget: float, model: Any) -> PeriodicTracer:
        from memlog.tracer.schedule.step_scheduler import PeriodicTracer  # noqa: PLC0415 - for those who want layers

        tracer = PeriodicTracer(
            self.run.worst_step, self._bus.publish, self._diagnostics, model, budget
        )
        self.batches.after_step = tracer.after_step
        self.batches.tracing_cost = tracer.cost
        return tracer

    def snapshot(self) -> None:
        """Traces the step that is now beginning."""
        if fork.generation == self._generation:
            if self._tracer is None:
                self._tracer = self._begin_tracing(0.0, None)
            self._tracer.want()

    def save_artifact(
        self, path: str | os.PathLike[str], kind: str, name: str | None
    ) -> Path | None:
        """Keeps a file in the run's folder and publishes that it is there."""
        # Imported here: most trainers keep no file.
        from memlog.journal.artifacts import (  # noqa: PLC0415
            Names,
            keep,
            not_kept,
            renamed,
        )

        if fork.generation != self._generation:
            return None
        if self._names is None:
            self._names = Names()
        try:
            file = Path(path)
            artifact = keep(self.run, file, name, kind, self._names)
        except Exception as error:  # noqa: BLE001 - the trainer's step must not fail on a report
            self._diagnostics.drop_each("artifact_not_kept", not_kept(path, error))
            return None
        told = renamed(artifact, file.name if name is None else name, kind)
        if told is not None:
            self._diagnostics.say_once(told, told)
        self.publish(artifact)
        return self.run.path / artifact.path

    def claim_steps(self) -> None:
        """The caller counts, and prints its own lines."""
        self.batches.claim()
        if self._console is not None:
            self._console.silence()

    def finish(self, status: Status, timeout: float, error: BaseException | None = None) -> None:
        """Takes everything out of the trainer's process and hands the rest to the helper.

        Args:
            status: How the run ended.
            timeout: Seconds to wait at most.
            error: The exception that ended it, or is on its way.
        """
        if fork.generation != self._generation:
            return  # a fork's copy: the run is its parent's
        try:
            last_words = self._close(status, error)
        except BaseException:  # Ctrl-C, or what another signal's handler raised
            self._cut_short(status)
            raise
        begun = time.monotonic()
        outcome: Outcome = "dead"
        try:
            with self._diagnostics.contained("waiting for what is still delivered"):
                outcome = self._deliver(last_words, timeout)
        except BaseException:  # likewise
            self._say_what_is_left("at work", max(time.monotonic() - begun, 0.1))
            raise
        self._say_what_is_left(outcome, timeout)

    def _close(self, status: Status, error: BaseException | None) -> Finish:
        """Takes everything out, and returns what the helper is to hear of it."""
        self._reserve = None
        contained = self._diagnostics.contained
        with contained("leaving torch"):
            self._autolog.remove()
        self._allocator.stop()
        if self._tracer is not None:
            with contained("ending the tracing of steps"):
                self._tracer.finish(failed=status != "finished")
        self._explain(error)
        diagnostics, end = self._sum_up(status), End(now_us(), status)
        self._bus.publish(end)
        self._run_detector.connect()
        with contained("closing the journal"):
            self._journal.close()
        with contained("closing the host's memory figures"):
            self.batches.close()
        say_what_was_lost(self.run, self._diagnostics)
        return self._last_words(end, diagnostics)

    def _last_words(self, end: End, diagnostics: HealthEvent) -> Finish:
        from memlog.delivery.helper.protocol import Finish  # noqa: PLC0415 - there since the helper was started

        dropped, faults = dict(self._diagnostics.dropped), dict(self._diagnostics.faults)
        return Finish(end, msgspec.structs.replace(diagnostics, dropped=dropped, faults=faults))

    def _cut_short(self, status: Status) -> None:
        """The helper hears at least that the run is over, and writes down what the journal lacks."""
        with self._diagnostics.contained("leaving torch"):
            self._autolog.remove()
        with self._diagnostics.contained("closing the journal"):
            self._journal.close()
        diagnostics = HealthEvent(now_us(), None, None, 0.0, {}, {})
        with self._diagnostics.contained("handing over the end of the run"):
            self._deliver(self._last_words(End(now_us(), status), diagnostics), 0)
        self._say_what_is_left("at work", 0.1)

    def _sum_up(self, status: Status) -> HealthEvent:
        """Publishes memlog's own state, with what is to be said of the whole run."""
        diagnostics = HealthEvent(now_us(), None, None, 0.0, {}, {})
        with self._diagnostics.contained("summing up the run"):
            self._helper.look_at_last()
            unjudged = None
            if self._judging is not None:
                unjudged = self._judging.say_what_was_not_judged(self._helper.is_away)
            diagnostics = self.batches.publish_health(unjudged)
            if status == "finished" and not self._published:
                self.batches.say_if_nothing_was_noticed()
        return diagnostics

    def _say_what_is_left(self, outcome: Outcome, waited: float) -> None:
        with self._diagnostics.contained("saying what is left to deliver"):
            if not self._is_for_trackers and (outcome == "dead" or not self._threads):
                outcome = "delivered"  # there is nothing that a tracker lacks
            say_what_is_left(self.run, outcome, waited, self._settings.linger, self._diagnostics)

    @property
    def _is_for_trackers(self) -> bool:
        """Whether there is, or has been, a tracker to deliver to."""
        named = set(self._settings.backends) - {LOCAL}
        return bool(named or self._journal.bindings)

    def _deliver(self, last_words: Finish, timeout: float) -> Outcome:
        """Waits until trackers have everything, for so long at most; says what has become of it."""
        deadline = time.monotonic() + timeout
        threads: list[UploadWorker | InProcessWriter] = [*self._threads, *self._writers.values()]
        try:
            waiting = Waiting(self.run, timeout, self._diagnostics)
            outcome = self._helper.the_last().finish(last_words, timeout, waiting)
        finally:
            for thread in threads:
                thread.complete()
        for thread in threads:
            if not thread.join(max(deadline - time.monotonic(), min(timeout, 1.0))):
                outcome = "at work" if outcome == "delivered" else outcome
        return outcome

    def _explain(self, error: BaseException | None) -> None:
        """Says what is known where memory ran out; the helper process makes a report of it."""
        with self._diagnostics.contained("describing what ended the run"):
            failed = failed_allocation(error)
            if failed is not None and not self._allocator.heard(failed):
                self._bus.publish(describe(failed, self.batches.last_step, error))

    def _start_helper(
        self,
        settings: Settings,
        begun_us: int,
        listener: AlertListener | None,
        undo: ExitStack,
    ) -> SupervisedHelper:
        # Imported here: `import memlog` stays light for those who never begin a session.
        from memlog.delivery.helper.protocol import Begin  # noqa: PLC0415
        from memlog.delivery.helper.supervisor import SupervisedHelper  # noqa: PLC0415

        begin = Begin(str(self.run.path), begun_us, os.getpid(), settings)
        helper = SupervisedHelper(self._diagnostics)
        undo.callback(helper.abandon)
        helper.start(begin, listener)
        return helper
