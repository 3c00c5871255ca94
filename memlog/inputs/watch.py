"""Record the inputs of the largest steps, and find the input dimension that determines the steps' peaks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from math import log, sqrt
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.events import (
    Batch,
    Device,
    Event,
    PeaksBySize,
    Reading,
    SampleLengths,
    StepInputs,
    TensorInput,
    Trace,
    now_us,
    peak_readings,
)
from memlog.inputs.relation import Relation, StepPeak, relation
from memlog.inputs.step_inputs import KeptTensors, inputs_at_step_end
from memlog.probes.process import read_heap

_WARM_UP = 3
"""Number of steps at the start whose inputs are not read. These steps set up buffers and optimizer state."""
_RECORD = 1.05
"""A peak is a new record if it is at least this number times the old record. The first record is the peak of
the last warm-up step (`_WARM_UP`). memlog publishes the inputs of each step with a new record."""
_RISEN = 1.01
"""A peak is a new high if it is at least this number times the old high. The first high is the peak of the
last warm-up step (`_WARM_UP`). memlog reads the inputs of each step with a new high."""
_LARGER = 1.1
"""If the inputs of a step with a new high have at least this number times as many elements as those of any
step published so far, memlog publishes them, too."""
_SHARE = 0.002
"""If reading inputs takes more than this fraction of the run's time, memlog reads only the inputs of steps
with a new high (`_RISEN`) or a new record (`_RECORD`)."""
_EVENTS = 200
"""Maximum number of `StepInputs` events of a run. Further events are not published."""
_STEPS = 400
"""Maximum number of steps to remember. At this number, memlog drops every second step."""
_EXACT = 64
"""Number of looks up to which memlog reads the inputs of each step that raises a device's peak, even by
little. Each such peak is known. In random order, they become rare."""
_POINTS = 48
"""Maximum number of steps in a `PeaksBySize` event."""
_EULER, _OF_SQUARES = 0.5772, 1.6449
"""Euler's constant and π²/6. For large n, the sum of 1/k (k = 1 to n) is about ln(n) plus `_EULER`, and the
sum of 1/k² is about `_OF_SQUARES`."""
_SIGMAS = 3
"""Minimum difference, in standard deviations, between the number of new highs and its mean for steps in
random order. If the difference is smaller, memlog makes no finding."""


class StepInputsWatch:
    """Reader of a step's inputs from the variables of running functions.

    Call it with the event of each step that may have raised a peak, and of each step from `next_look` on.
    Call it on the trainer's thread, within the call of the optimizer's step. At this moment, the functions
    that ran the step still have their variables.

    ``every`` is the number of steps for each event. ``host_free`` returns the bytes that the process can
    still take; ``None``: unknown. ``lengths`` returns the lengths of the samples that are trained on.

    Attributes:
        next_look: Time of the next look at a step's inputs, ``time.perf_counter_ns()``.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        every: int = 1,
        host_free: Callable[[], int | None] = lambda: None,
        lengths: Callable[[], SampleLengths | None] = lambda: None,
    ) -> None:
        self._every = every
        self._host_free = host_free
        self._lengths = lengths
        self._publish = publish
        self._diagnostics = diagnostics
        self._device = "host"
        self._capacities: dict[str, int | None] = {}
        self._begun = time.perf_counter_ns()
        self.next_look = self._spent = self._cost = 0
        self._published = 0
        self._newest_published = -1
        self._most_elements = 0
        """Highest number of elements in the inputs of a step that was published."""
        self._kept = KeptTensors()
        self._tensors: list[weakref.ref[Any]] = []
        """The tensors of the look before."""
        self._found: Relation | None = None
        self._told: object = None
        self._sample_lengths: SampleLengths | None = None
        self._finished_at: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._warm_up = _WARM_UP
        self._first = self._rises = self._record = self._risen = self._highest = self._level = 0
        self._steps: list[StepPeak] = []
        self._early: list[StepPeak] = []
        """Steps of the warm-up, after the first, that raised a device's peak."""
        self._looks = 0
        self._traced: dict[int, int] = {}
        """Peaks of traced steps on the device, in bytes."""

    def __call__(self, batch: Batch) -> None:
        """Process the end of a step."""
        reading = _reading(batch)
        device, after, peak = reading.owner, reading.level, reading.peak
        # The peaks of two devices can't be compared.
        if device != self._device:
            self._device, self.next_look = device, 0
            self._forget()
        if peak is None or after is None:
            return
        before, self._highest, self._level = self._level, peak, after
        if self._warm_up:
            self._warm_up -= 1
            self._record = self._risen = peak
            self._first = batch.step
            # Besides, the next look then sees what grows, and what is new.
            inputs, fresh = self._read_inputs(peak)
            if reading.source == "exact" and device != "host" and inputs:
                self._early.append(
                    StepPeak(batch.step, inputs, peak, known=True, after=after, fresh=fresh)
                )
            # The first look after the warm-up is due at once.
            if not self._warm_up:
                self.next_look = self._begun
            return
        rose = reading.source == "exact"
        has_risen = rose and peak >= _RISEN * self._risen
        if has_risen:
            self._risen = peak
            self._rises += 1
        is_record = rose and peak >= _RECORD * self._record
        now = time.perf_counter_ns()
        is_exact = rose and device != "host" and self._looks < _EXACT
        if has_risen or is_record or is_exact or now >= self.next_look:
            # If other code resets the mark between the steps, the new mark is the step's peak, too.
            is_reset = reading.source == "sampled"
            if not (is_reset and peak <= before):
                known = rose or is_reset
                self._look(batch.step, peak, after, rose=known, is_record=is_record, rises=is_exact)
            self._cost = time.perf_counter_ns() - now
            self._spent += self._cost
            # Until then, one more look keeps to the share of the run's time.
            self.next_look = self._begun + int((self._spent + self._cost) / _SHARE)

    def device_found(self, event: Event) -> None:
        """Remember the capacity of a device."""
        if isinstance(event, Device):
            self._capacities[event.name] = event.capacity

    def step_traced(self, event: Event) -> None:
        """Remember the peak of a traced step. It is known even if it was no new high of the device."""
        if not isinstance(event, Trace) or event.step is None or event.peak is None:
            return
        if event.exact and event.device == self._device != "host":
            self._traced[event.step] = event.peak

    def finish(self, step: int | None) -> None:
        """Publish the inputs of the newest step that raised the peak. Publish the finding if there is one.

        Call it when the run may end. ``step`` is the last complete step. If ``step`` is ``None``, there was
        no complete step, and nothing is published. Without new steps, a second call publishes nothing.
        """
        with self._diagnostics.contained("relating the steps' inputs to their peaks"):
            if step not in (None, self._finished_at):
                self._finished_at = step
                self._publish_largest()
                self._find(step, at_the_end=True)

    def _look(
        self, step: int, peak: int, after: int, *, rose: bool, is_record: bool, rises: bool
    ) -> None:
        inputs, fresh = self._read_inputs(peak)
        if is_record:
            self._record = peak
        if not inputs:
            return
        if self._device == "host":
            # The process holds idle bytes of its heap, but no tensor uses them.
            heap = read_heap()
            after -= 0 if heap is None else heap.idle
        if len(self._steps) >= _STEPS:
            del self._steps[1::2]
        self._steps.append(StepPeak(step, inputs, peak, rose, after, fresh))
        if is_record or (rose and _elements(self._steps[-1]) >= _LARGER * self._most_elements):
            self._publish_inputs(self._steps[-1])
        self._looks += 1
        if is_record:
            self._find(step)
        elif rises or not self._looks & (self._looks - 1):  # a power of two
            steps = self._known_steps()
            self._publish_peaks(relation(steps), steps, step)

    def _known_steps(self) -> list[StepPeak]:
        traced = self._traced
        return [
            step
            if step.known or step.step not in traced
            else step._replace(peak=traced[step.step], known=True)
            for step in self._steps
        ]

    def _read_inputs(self, peak: int) -> tuple[tuple[TensorInput, ...], frozenset[str]]:
        """Return the tensors among the step's variables, and the names of those that are new."""
        inputs, tensors = inputs_at_step_end()
        # Weak references, because memlog must not keep a batch alive.
        known, self._tensors = self._tensors, [weakref.ref(tensor) for tensor in tensors]
        before = {id(old) for reference in known if (old := reference()) is not None}
        pairs = zip(inputs, tensors, strict=True)
        fresh = frozenset(described.name for described, tensor in pairs if id(tensor) not in before)
        return self._kept.inputs_among(inputs, peak, fresh), fresh

    def _publish_inputs(self, step: StepPeak) -> None:
        if self._published >= _EVENTS:
            return
        self._published += 1
        self._newest_published = step.step
        self._most_elements = max(self._most_elements, _elements(step))
        like = (
            earlier.step
            for earlier in self._steps
            if earlier.inputs == step.inputs and earlier.peak * _RECORD <= step.peak
        )
        self._publish(
            StepInputs(
                time_us=now_us(),
                step=step.step,
                device=self._device,
                peak=step.peak,
                inputs=self._varying_first(_most_likely(step)),
                like_step=next(like, None),
            )
        )

    def _varying_first(self, inputs: tuple[TensorInput, ...]) -> tuple[TensorInput, ...]:
        """Return the inputs that differ between steps, then the others, such as a whole data set."""
        constant = set(inputs).intersection(*(step.inputs for step in self._steps))
        return tuple(sorted(inputs, key=lambda tensor: tensor in constant))

    def _publish_largest(self) -> None:
        """Publish the inputs of the newest step that raised the peak, unless they are published already."""
        newest = next((step for step in reversed(self._steps) if step.known), None)
        if self._published and newest is not None and newest.step > self._newest_published:
            self._publish_inputs(newest)

    def _find(self, step: int, *, at_the_end: bool = False) -> None:
        """Publish the finding if steps become far larger and the size of an input explains this.

        During the run, publish only one finding. At the end, publish the finding about the whole run. If
        steps became larger for a while only, it replaces that of the run and has no growth.
        """
        steps = self._known_steps()
        related = relation(steps)
        self._publish_peaks(related, steps, step, at_the_end=at_the_end)
        known, grows = self._found, self._steps_grow(step)
        if (known is not None and not at_the_end) or not (grows or known):
            return
        latest = related
        if known is not None and not grows:
            latest = (latest or known)._replace(per_step=0.0)
        if latest is None:
            return
        from memlog.inputs.relation import larger_steps, matters  # noqa: PLC0415 - rarely needed

        if matters(latest):
            self._found = latest
            self._publish(
                larger_steps(
                    latest,
                    step,
                    self._highest,
                    self._device,
                    at_the_end=at_the_end,
                    free=self._free(latest.peak),
                )
            )

    def _publish_peaks(
        self, found: Relation | None, steps: list[StepPeak], step: int, *, at_the_end: bool = False
    ) -> None:
        """Publish the peaks by the size of the dimension that they follow, if there is news.

        ``found`` is the relation in ``steps``. The steps of the warm-up count, too, if they are like these.
        """
        found = (relation([*self._early, *steps]) if self._early else None) or found
        told = (
            None if found is None else (found.name, found.dimension, len(found.points), found.seen)
        )
        if found is None or told == self._told or self._published >= _EVENTS:
            return
        self._told = told
        self._published += 1
        if self._sample_lengths is None or not at_the_end:
            # At the end, the loader of an evaluation may be the only one that is left.
            self._sample_lengths = self._lengths()
        # The selection starts at the end, because the largest size must be in it.
        points = sorted(found.points)
        stride = -(-len(points) // _POINTS)
        self._publish(
            PeaksBySize(
                time_us=now_us(),
                step=step,
                device=self._device,
                name=found.name,
                dimension=found.dimension,
                is_length=found.is_length,
                points=tuple(points[::-stride][::-1]),
                largest=found.seen,
                steps=max((step - self._first) // self._every, 1),
                batch=found.batch,
                grows=found.per_step > 0,
                lengths=self._sample_lengths,
            )
        )

    def _free(self, peak: int) -> int | None:
        """Return the bytes between a peak and the limit of the device or process; ``None``: unknown."""
        if self._device == "host":
            free = self._host_free()
            limit = None if free is None else free + self._level
        else:
            limit = self._capacities.get(self._device)
        return None if limit is None else max(limit - peak, 0)

    def _steps_grow(self, step: int) -> bool:
        """Return True if the peak rose far more often than in steps of random order.

        In random order, step k is the largest so far with probability 1/k (Foster and Stuart 1954).
        """
        count = (step - self._first) // self._every
        mean = log(max(count, 1)) + _EULER
        variance = max(mean - _OF_SQUARES, 1.0)
        return self._rises - mean >= _SIGMAS * sqrt(variance)


def _reading(batch: Batch) -> Reading:
    """Return the reading of the accelerator with the highest peak, or of the process."""
    readings = peak_readings(batch)
    return (
        readings[0] if len(readings) == 1 else max(readings, key=lambda reading: reading.peak or 0)
    )


def _most_likely(step: StepPeak) -> tuple[TensorInput, ...]:
    """Return a step's inputs without tensors that are older, such as a data set or what a function has left.

    If all tensors are older, the step may train with the same ones each time, so all are returned.
    """
    fresh = tuple(tensor for tensor in step.inputs if tensor.name in step.fresh)
    return fresh or step.inputs


def _elements(step: StepPeak) -> int:
    return sum(tensor.elements for tensor in _most_likely(step))
