"""Publication of a batch event for each step, in the trainer's loop."""

from __future__ import annotations

import re
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from time import perf_counter_ns, process_time, time_ns
from typing import Any, Protocol

from memlog._internal import processes
from memlog._internal.diagnostics import NOT_NOTICED, Diagnostics
from memlog._internal.signals import raised_by_handler
from memlog.autolog.run_detector import RunDetector, RunParameters, TrainerNumbers, checked_number
from memlog.bus import EventBus
from memlog.events import Batch, DeviceReading, Health, HeapReading, PinnedMemory, Run, now_us
from memlog.journal import JournalWriter, RunDirectory, list_runs
from memlog.probes.accelerator import AcceleratorProbe
from memlog.probes.process import HostProbe, PeakWindow, read_heap, read_pinned
from memlog.settings import Settings
from memlog.torchside.loaded import has_built_graphs, has_loaders_workers

_WORK = 1.0
"""Processor seconds. Programs that took less have not trained: to import torch alone takes longer."""
_HEAP_GAP = 16
"""Steps between the first two readings of the heap."""
HEALTH_INTERVAL_NS = 10_000_000_000
"""Nanoseconds between health events."""


class Requests(Protocol):
    """Requests of the helper process. There are new ones if the first of the ``words`` is not ``seen``."""

    words: memoryview
    seen: int
    take: Callable[[], object]
    """Function that handles the new requests. It must not raise."""


class Inputs(Protocol):
    """Reader of the inputs of steps. It takes steps that may have raised a peak, and those after a time."""

    next_look: int
    """Time from which each step is passed, ``time.perf_counter_ns()``."""

    def __call__(self, batch: Batch, /) -> None: ...


def _has_not_trained() -> bool:
    """Return True for a call for help, without an autograd graph, or without torch if little was computed.

    The program ended early, for example because a file was missing, or it was meant to train nothing.
    """
    if not {"-h", "--help", "--version"}.isdisjoint(sys.argv[1:]):
        return True
    if "torch" not in sys.modules:
        return process_time() < _WORK
    return not has_built_graphs()


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
        self._every = settings.every
        self._bus = bus
        self._run_detector = run_detector
        self._diagnostics = diagnostics
        self._generation = self._warned_in = processes.generation
        self.host = HostProbe(diagnostics)
        self._accelerators = AcceleratorProbe(diagnostics)
        self.parameters = RunParameters(
            settings, bus, run_detector, self._accelerators, diagnostics, model, before_parameters
        )
        self.health = HealthReport(bus, journal, diagnostics)
        self._next = self._due_from = settings.initial_step
        self._begun = self._by_hand = self._claimed = False
        self.lock = threading.RLock()
        """Lock for steps that the user's threads report."""
        self._numbers = TrainerNumbers()
        self._last: Batch | None = None
        self._heap_due, self._heap_gap = self._next, _HEAP_GAP
        """Step after which the heap is read next, and the steps from then to the reading after that."""
        self._pinned: tuple[int, ...] = ()
        """Pinned memory that was published last."""
        self._pinned_peaks = PeakWindow()
        self._read_devices_at = 0
        """Time from which accelerators are read at each step, ``time.perf_counter_ns()``."""
        self.after_step: Callable[[int], object] | None = None
        """Function called with the number of each completed step. It must not raise."""
        self.inputs: Inputs | None = None
        """Reader of the inputs of steps, called within each step that it takes."""
        self.requests: Requests | None = None
        """Requests of the helper process, for which each step looks."""
        self.check_helper: Callable[[int], object] | None = None
        """Function called after a step from `helper_check_due` on, with the time. It must not raise."""
        self.tell_size: Callable[[], object] | None = None
        """Function called once after some steps, if no trainer counts them. It must not raise."""
        self.helper_check_due = 0
        """Time of the next call of `check_helper`, ``time.perf_counter_ns()``."""

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Record a step that `OptimizerClock` counts. Never raises."""
        if processes.generation != self._generation and self._is_forked_copy():
            return
        if not self._begun:
            with self._diagnostics.contained("looking for the model's device"):
                self._accelerators.notice(_device_type(optimizer))
        if not (self._by_hand or self._claimed):
            self._record()

    def other_thread_stepped(self) -> None:
        """Record a step of a thread that does not lead (`memlog.autolog.optimizer_steps`). Never raises."""
        if processes.generation == self._generation and not (self._by_hand or self._claimed):
            probe = HostProbe(
                self._diagnostics
            )  # the peaks of `host` belong to the leading thread's steps
            self._run_detector.step_beside(self._next, probe.read()[0])
            probe.close()

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

    @property
    def claimed(self) -> bool:
        """True if a trainer or a monitor counts the steps."""
        return self._claimed

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
        if processes.generation == self._generation:
            return False
        if self._warned_in != processes.generation:
            self._warned_in = processes.generation
            # New diagnostics, because a thread that no longer exists may have held the copied lock.
            Diagnostics().say_once(
                "fork",
                "this process is a fork of the one that began the run, so its steps are not recorded: call "
                "memlog.init() after the fork (a program that becomes a daemon has forked), or leave it out "
                "and start the program with `memlog run`",
            )
        return True

    @property
    def last_step(self) -> int | None:
        """Last completed step; ``None`` before the first."""
        return self._next - 1 if self._begun else None

    @property
    def last(self) -> Batch | None:
        """Newest step that was published; ``None`` before the first."""
        return self._last

    @property
    def last_or_first_step(self) -> int:
        """Last completed step, or the first step if no step is completed.

        So phases before the first step have a step number, too.
        """
        return self._next - 1 if self._begun else self._next

    @property
    def next_step(self) -> int:
        return self._next

    def warn_if_no_steps(self, run: RunDirectory) -> None:
        """Print a warning if ``run`` has no step, epoch or evaluation, and may have trained all the same."""
        if not self._begun and not self.parameters.published:
            message = f"nothing was recorded, because {NOT_NOTICED}"
            children = child_processes() or _working_processes()
            # If this process has computed gradients, they are probably a DataLoader's workers, too.
            if children and not has_built_graphs() and not has_loaders_workers():
                if list_runs(run.path.parent)[-1].id != run.id:
                    return  # a child process has begun a run of its own
                message = (
                    "nothing was recorded in this process, because memlog noticed no optimizer step here. It "
                    f"has started {children}: if they train, call memlog.init() in the code that they run, "
                    "or leave it out and start the program with `memlog run`"
                )
            elif _has_not_trained():
                return
            self._diagnostics.say_once("no_steps", message)

    def _record(self, number: int | None = None) -> None:
        begun = perf_counter_ns()
        step = self._next
        self._next, self._begun, due = step + 1, True, False
        try:
            runs = self._run_detector
            if runs.looks_for_runs and runs.begin_step(step, number):
                self._due_from = step
                self.parameters.published = False  # every run of the user gets the parameters
            due = self._every == 1 or (step - self._due_from) % self._every == 0
            if due:
                devices: tuple[DeviceReading, ...] = ()
                if begun >= self._read_devices_at or not self.parameters.published:
                    devices = self._read_devices(begun)
                rss, peak, source, anon, shared, spaces = self.host.read()
                self._last = Batch(
                    time_ns() // 1000, step, rss, peak, source, devices, anon, shared, spaces
                )
                self._bus.publish(self._last)
                inputs = self.inputs
                if inputs is not None and (
                    begun >= inputs.next_look
                    or (devices[0].peak_source if devices else source) == "exact"
                    or len(devices) > 1
                ):
                    inputs(self._last)
            requests = self.requests
            if requests is not None and requests.words[0] != requests.seen:
                requests.take()
            if self.after_step is not None:
                self.after_step(step)
        except BaseException as error:
            if self._is_a_handlers(error, step if due else None):
                raise
        health, ended = self.health, perf_counter_ns()
        health.spent += ended - begun
        health.steps += 1
        if ended >= health.due or ended >= self.helper_check_due or step >= self._heap_due:
            self._do_what_is_due(ended, step)

    def _do_what_is_due(self, now: int, step: int) -> None:
        if step >= self._heap_due:
            if self._heap_gap > _HEAP_GAP and self.tell_size is not None:
                # At the second reading, all optimizers have stepped.
                tell, self.tell_size = self.tell_size, None
                if not self._claimed:
                    tell()
            # The gaps become longer: in a million steps, there are 25 readings, which take 5 to 500 µs each.
            self._heap_due = step + self._heap_gap
            self._heap_gap += self._heap_gap // 2
            heap = read_heap()
            if heap is not None:
                self._bus.publish(HeapReading(now_us(), step, heap.in_use, heap.idle))
        self.publish_pinned()
        if now >= self.health.due:
            self.health.publish(self.last_step)
        if now >= self.helper_check_due and self.check_helper is not None:
            self.check_helper(now)

    def publish_pinned(self) -> None:
        """Publish the pinned memory of torch if it has changed. Never raises."""
        with self._diagnostics.contained("reading the pinned memory"):
            sizes = read_pinned()
            if sizes is None or sizes == self._pinned or not (sizes.peak or self._pinned):
                return
            self._pinned = sizes
            peak, source = self._pinned_peaks.advance(sizes.held, sizes.peak)
            if peak is not None and source is not None:
                event = PinnedMemory(
                    now_us(), self.last_step, sizes.held, sizes.in_use, peak, source
                )
                self._bus.publish(event)

    def _read_devices(self, now: int) -> tuple[DeviceReading, ...]:
        """Return the readings of the devices in use. Publish new devices, and the run's parameters once."""
        devices = self._accelerators.read()
        self._read_devices_at = 0 if devices else now + self._accelerators.idle_ns()
        self.parameters.publish(devices)
        return devices

    def _is_a_handlers(self, error: BaseException, due: int | None) -> bool:
        """Return True if a signal handler has raised the error. Count any other error as a fault.

        ``due`` is a step that needs an event. If it has none yet, the event is lost, and is counted.
        """
        if isinstance(error, Exception) and not raised_by_handler(error):
            self._diagnostics.fault("recording a step", error)
            return False
        if due is not None and (self._last is None or self._last.step != due):
            self._diagnostics.drop(
                "interrupted",
                "a signal handler raised an exception while memory was being read: that step has no event",
            )
        return True


def run_event(settings: Settings, begun_us: int) -> Run:
    return Run(
        time_us=begun_us,
        name=settings.name,
        project=settings.project,
        backends=settings.backends,
        settings=settings.described(),
    )


def child_processes() -> str:
    """Return how many processes this one has started with ``multiprocessing``, ended or not; empty: none."""
    counter = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
    known = re.fullmatch(r"count\((\d+)\)", repr(counter))  # its next number, from 1
    number = 0 if known is None else int(known[1]) - 1
    return "a child process" if number == 1 else f"{number:,} child processes" * (number > 0)


def _working_processes() -> str:
    """Return what processes this one has started, if those that ended took `_WORK` seconds; else nothing."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if used.ru_utime + used.ru_stime < _WORK:
        return ""
    return "child processes" if processes.has_children else "other programs"


def _device_type(optimizer: Any) -> str:
    """Return the type of the device that holds an optimizer's first parameter.

    The type shows whether MPS is in use. Reading the memory of an unused MPS would initialise it.
    """
    return str(next(iter(optimizer.param_groups[0]["params"])).device.type)


class HealthReport:
    """Publisher of memlog's own cost and errors, about every `HEALTH_INTERVAL_NS` nanoseconds.

    Attributes:
        spent: Nanoseconds that memlog took since the last health event; the caller adds them.
        steps: Number of steps since then; the caller counts them.
        due: Time at which the next health event is due, ``time.perf_counter_ns()``.
    """

    def __init__(self, bus: EventBus, journal: JournalWriter, diagnostics: Diagnostics) -> None:
        self._bus = bus
        self._journal = journal
        self._diagnostics = diagnostics
        self.tracing_cost: Callable[[], tuple[float, float, str]] = lambda: (0.0, 0.0, "")
        """Function that returns the seconds of tracing and its set-up, and the reason why the first trace
        waits, empty if it does not. The function must not raise."""
        self.spent = self.steps = self._total = self._all_steps = 0
        self.due = perf_counter_ns() + HEALTH_INTERVAL_NS

    def publish(self, step: int | None, unjudged: Mapping[str, str] | None = None) -> Health:
        """Publish a health event after ``step``, and return it.

        ``unjudged`` contains the alert rules that were never judged in the whole run, each with the reason.
        ``None``: the run has not ended.
        """
        self._total += self.spent
        self._all_steps += self.steps
        mean = self.spent / self.steps / 1e6 if self.steps else None
        self.spent = self.steps = 0
        self.due = perf_counter_ns() + HEALTH_INTERVAL_NS
        tracing, set_up, untraced = self.tracing_cost()
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
            untraced=untraced,
        )
        self._bus.publish(event)
        return event
