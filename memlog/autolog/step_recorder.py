"""Publication of a batch event for each step, in the trainer's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from memlog._internal import fork
from memlog._internal.diagnostics import NOT_NOTICED, Diagnostics
from memlog._internal.signals import raised_by_handler
from memlog.autolog.run_detector import RunDetector
from memlog.autolog.run_parameters import RunParameters
from memlog.autolog.step_numbers import TrainerNumbers, checked_number
from memlog.bus import EventBus
from memlog.events import Batch, Health, Run, now_us
from memlog.journal import JournalWriter
from memlog.probes.accelerator import AcceleratorProbe
from memlog.probes.host import HostProbe
from memlog.settings import Settings

HEALTH_INTERVAL_NS = 10_000_000_000
"""Nanoseconds between health events."""


class BatchRecorder:
    """Recorder of steps. It numbers the steps, reads memory at each step, and publishes a batch event.

    The size of ``model`` becomes one of the run's parameters. ``before_parameters`` is called before the
    run's parameters are published, and must not raise. ``host`` holds the host's memory at the last step.
    """

    def __init__(
        self,
        settings: Settings,
        bus: EventBus,
        journal: JournalWriter,
        run_detector: RunDetector,
        diagnostics: Diagnostics,
        model: Any,
        before_parameters: Callable[[], object],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._run_detector = run_detector
        self._diagnostics = diagnostics
        self._generation = self._warned_in = fork.generation
        self.host = HostProbe(diagnostics)
        self._accelerators = AcceleratorProbe(diagnostics)
        self.parameters = RunParameters(
            settings, bus, run_detector, self._accelerators, diagnostics, model, before_parameters
        )
        self.health = HealthReport(bus, journal, diagnostics)
        self._next = self._due_from = settings.initial_step
        self._begun = self._by_hand = self._claimed = False
        self._numbers = TrainerNumbers()
        self._last: Batch | None = None
        self.after_step: Callable[[int], object] | None = None
        """Function called with the number of each completed step. It must not raise."""
        self.check_helper: Callable[[int], object] | None = None
        """Function called after each step with the time, ``time.perf_counter_ns()``. It must not raise."""

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Record a step that `OptimizerClock` counts. Never raises."""
        if self._is_forked_copy():
            return
        if not self._begun:
            with self._diagnostics.contained("looking for the model's device"):
                self._accelerators.notice(_device_type(optimizer))
        if not (self._by_hand or self._claimed):
            self._record()

    def step_by_hand(self, number: object = None) -> None:
        """Record a step that the caller reports. From now on only the caller's steps count. Never raises.

        ``number`` is the caller's own number of the step; ``None``: the caller has no number.
        """
        if self._is_forked_copy():
            return
        own = checked_number(number, self._diagnostics)
        # When the caller reports a step for the first time, an optimizer may already have recorded that step.
        recorded = not (self._by_hand or self._claimed) and self._begun
        self._by_hand = self._by_hand or not self._claimed
        if recorded:
            if own is not None:
                self._numbers.recorded(own, self._next - 1)
            return
        if own is not None:
            self._next = self._numbers.step_of(own, self._next)
        self._record(own)

    def claim(self, *, only_first: bool) -> None:
        """Ignore optimizer steps until `release` is called. Only reported steps count.

        With ``only_first``, the call has no effect if the session has recorded a step.
        """
        if not (only_first and self._begun):
            self._claimed = True

    def release(self) -> None:
        """End `claim`. If no step was reported by hand before `claim`, optimizer steps count from now on."""
        self._claimed = False

    def count(self, number: object = None) -> tuple[int, Batch | None] | None:
        """Record a step as `step_by_hand` does. Return the session's step number and the step's event.

        If the step has no event, the second value is ``None``. In a forked process, the result is ``None``.
        """
        if self._is_forked_copy():
            return None
        self.step_by_hand(number)
        step, last = self._next - 1, self._last
        return step, last if last is not None and last.step == step else None

    def _is_forked_copy(self) -> bool:
        """Return True in a forked process, where nothing is recorded. Print a message once per process."""
        if fork.generation == self._generation:
            return False
        if self._warned_in != fork.generation:
            self._warned_in = fork.generation
            # New diagnostics, because a thread that no longer exists may have held the copied lock.
            Diagnostics().say_once(
                "fork",
                "this process is a fork of the one that began the run, so its steps are not recorded: call "
                "memlog.init() after the fork (a program that becomes a daemon has forked)",
            )
        return True

    @property
    def last_step(self) -> int | None:
        """Last completed step; ``None`` before the first."""
        return self._next - 1 if self._begun else None

    @property
    def last_or_first_step(self) -> int:
        """Last completed step, or the first step if no step is completed.

        So phases before the first step have a step number, too.
        """
        return self._next - 1 if self._begun else self._next

    @property
    def next_step(self) -> int:
        return self._next

    def warn_if_no_steps(self) -> None:
        """Print a warning if the run has no step, epoch or evaluation."""
        if not self._begun and not self.parameters.published:
            self._diagnostics.say_once("no_steps", f"nothing was recorded, because {NOT_NOTICED}")

    def _record(self, number: int | None = None) -> None:
        begun = time.perf_counter_ns()
        step = self._next
        self._next, self._begun, due = step + 1, True, False
        try:
            if self._run_detector.begin_step(step, number):
                self._due_from = step
                self.parameters.published = False  # every run of the user gets the parameters
            due = (step - self._due_from) % self._settings.every == 0
            if due:
                self._publish(step)
            if self.after_step is not None:
                self.after_step(step)
        except BaseException as error:
            if isinstance(error, Exception) and not raised_by_handler(error):
                self._diagnostics.fault("recording a step", error)
            else:
                if due and (self._last is None or self._last.step != step):
                    self._diagnostics.drop(
                        "interrupted",
                        "a signal handler raised an exception while memory was being read: that step has no "
                        "event",
                    )
                raise
        ended = time.perf_counter_ns()
        if self.health.add(ended - begun, ended):
            self.health.publish(self.last_step)
        if self.check_helper is not None:
            self.check_helper(ended)

    def _publish(self, step: int) -> None:
        devices = self._accelerators.read()
        self.parameters.publish(devices)
        rss, rss_peak, rss_peak_source = self.host.read()
        self._last = Batch(now_us(), step, rss, rss_peak, rss_peak_source, devices)
        self._bus.publish(self._last)


def run_event(settings: Settings, begun_us: int) -> Run:
    return Run(
        time_us=begun_us,
        name=settings.name,
        project=settings.project,
        backends=settings.backends,
        settings=settings.described(),
    )


def _device_type(optimizer: Any) -> str:
    """Return the type of the device that holds an optimizer's first parameter.

    The type shows whether MPS is in use. Reading the memory of an unused MPS would initialise it.
    """
    return str(next(iter(optimizer.param_groups[0]["params"])).device.type)


class HealthReport:
    """Publisher of memlog's own cost and errors, about every `HEALTH_INTERVAL_NS` nanoseconds."""

    def __init__(self, bus: EventBus, journal: JournalWriter, diagnostics: Diagnostics) -> None:
        self._bus = bus
        self._journal = journal
        self._diagnostics = diagnostics
        self.tracing_cost: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        """Function that returns the seconds that tracing and its set-up have cost. It must not raise."""
        self._spent = self._steps = self._total = self._all_steps = 0
        self._due = time.perf_counter_ns() + HEALTH_INTERVAL_NS

    def add(self, spent_ns: int, now_ns: int) -> bool:
        """Add the time that memlog took at a step. Return True if a health event is due."""
        self._spent += spent_ns
        self._steps += 1
        return now_ns >= self._due

    def publish(self, step: int | None, unjudged: Mapping[str, str] | None = None) -> Health:
        """Publish a health event after ``step``, and return it.

        ``unjudged`` contains the alert rules that were never judged in the whole run, each with the reason.
        ``None``: the run has not ended.
        """
        self._total += self._spent
        self._all_steps += self._steps
        mean = self._spent / self._steps / 1e6 if self._steps else None
        self._spent = self._steps = 0
        self._due = time.perf_counter_ns() + HEALTH_INTERVAL_NS
        tracing, set_up = self.tracing_cost()
        event = Health(
            time_us=now_us(),
            step=step,
            overhead_ms=mean,
            overhead_total_ms=self._total / 1e6,
            dropped=dict(self._diagnostics.dropped),
            faults=dict(self._diagnostics.faults),
            queued=self._journal.queued,
            unjudged=dict(unjudged or {}),
            tracing_ms=tracing * 1e3,
            tracing_set_up_ms=set_up * 1e3,
            steps=None if unjudged is None else self._all_steps,
        )
        self._bus.publish(event)
        return event
