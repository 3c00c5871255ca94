"""Samples of the training process's tree. The helper takes them, because the training loop has no time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.client import ARGUMENTS
from memlog.events import (
    RESERVED,
    Batch,
    ChildReading,
    Device,
    DeviceUse,
    End,
    Event,
    Health,
    OutOfMemory,
    Sample,
    now_us,
    readings,
)
from memlog.journal import Binding, JournalFile, Position
from memlog.journal.format import START
from memlog.probes.machine import (
    ProcessTree,
    available_memory,
    machine_memory,
    memory_limit,
    read_again,
    read_cgroup,
)
from memlog.probes.nvml import Nvml, ProcessUse

_STEPS = 5
"""Number of steps after which a sample is due. After a run's first 500 steps, the number grows (`_PART`)."""
_PART = 100
"""Divisor. After n steps of a run, a sample is due every max(`_STEPS`, n / `_PART`) steps.

Samples become rarer during a run, so that the journal stays small.
"""
_LOOK = 0.05
"""Minimum seconds between two samples. If steps are fast, this is also the value of `Sampler.pause`."""
_SHARE = 0.02
"""Maximum fraction of one processor's time for samples that are due because of fast steps. A slow sample
delays the next sample."""
_FIRST = 0.2
"""Processor seconds that a run's first samples may take before `_SHARE` limits the samples.

With `_SHARE` alone, a short run would get few samples.
"""


class DevicesInUse:
    """Devices that the trainer has reported, and the bytes that the trainer's allocator holds on each."""

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}
        self._reserved: dict[str, tuple[int | None, int | None]] = {}

    def take(self, device: Device) -> None:
        """Store a device that the trainer has reported. It replaces an earlier device of the same name."""
        self._devices[device.name] = device

    def take_step(self, event: Batch) -> None:
        """Store the bytes that the trainer's allocator holds on each device at the end of a step."""
        for reading in readings(event):
            if reading.name.endswith(RESERVED):
                _, before = self._reserved.get(reading.owner, (None, None))
                self._reserved[reading.owner] = before, reading.level

    def read(
        self, nvml: Nvml, trainer: int, children: Collection[int] = ()
    ) -> tuple[DeviceUse, ...]:
        """Return the memory in use on each device, except devices that the driver does not report.

        ``trainer`` and ``children`` are process ids: of the training process, and of its descendants.
        """
        uses = []
        for name, device in self._devices.items():
            # The driver does not tell the memory of devices that share the host's.
            if device.uuid is None or device.shares_host:
                continue
            used = nvml.read(device.uuid, device.capacity)
            if used is not None:
                others = _of_others(nvml.processes(device.uuid), trainer, children)
                uses.append(DeviceUse(name, used, self._other(name, used), others))
        return tuple(uses)

    def _other(self, name: str, used: int) -> int | None:
        # `used` was read after `held`. The allocator may have reserved or released memory in between. So the
        # difference counts only if the last two steps reported the same number of bytes.
        before, held = self._reserved.get(name, (None, None))
        return used - held if held is not None and before == held <= used else None


def _of_others(found: Sequence[ProcessUse], trainer: int, children: Collection[int]) -> int | None:
    """Return the bytes of processes outside the training; ``None`` if unknown."""
    if all(process.pid != trainer for process in found):
        return None  # in a container, the driver's ids can be those of other processes here
    others = [
        process.used for process in found if process.pid != trainer and process.pid not in children
    ]
    known = [used for used in others if used is not None]
    return sum(known) if len(known) == len(others) else None


class StepFollower:
    """Reader of the trainer's journal. It keeps the newest step, health event, end event and devices.

    ``on_event`` is called with each event, in order.
    """

    def __init__(
        self, file: JournalFile, on_event: Callable[[Event], object] = lambda _: None
    ) -> None:
        self._file = file
        self._on_event = on_event
        self._at: Position = START
        self.step: int | None = None
        self.bindings: Mapping[str, Binding] = {}
        """The user's runs to which the newest step belongs, by backend."""
        self.since: float | None = None
        """Monotonic time at which the first step was seen."""
        self.end: End | None = None
        self.health: Health | None = None
        self.devices = DevicesInUse()
        self._failed = False

    @property
    def ended_badly(self) -> bool:
        """True if the run has no end event.

        Also true if memory ran out after the run's last step and the end event's status is not ``finished``.
        """
        return self.end is None or (self._failed and self.end.status != "finished")

    def look(self) -> int | None:
        """Read new events, and return the newest step in the journal; ``None`` before the first step."""
        for entry in self._file.read(self._at):
            self._at = entry.end
            self._on_event(entry.event)
            if isinstance(entry.event, Batch):
                self.step, self.bindings = entry.event.step, entry.header.bindings
                self._failed = False
                self.devices.take_step(entry.event)
            elif isinstance(entry.event, Device):
                self.devices.take(entry.event)
            elif isinstance(entry.event, OutOfMemory):
                self._failed = not entry.event.caught
            elif isinstance(entry.event, Health):
                self.health = entry.event
            elif isinstance(entry.event, End):
                self.end = entry.event
        if self.step is not None and self.since is None:
            self.since = time.monotonic()
        return self.step


class Sampler:
    """Sampler of the training process's tree. It publishes a `Sample` every ``interval`` seconds.

    Samples come earlier if the trainer makes many steps. Between samples, the sampler reads the same child
    processes again, and calls ``on_children`` with the newest step and these readings. The readings are not
    published, so that the journal stays small.

    ``is_told`` gets `StepFollower.bindings`. It returns False if the trainer's message about one of these
    runs has not been read yet. A sample would then count as one of the run before, so it is made later.
    """

    def __init__(
        self,
        trainer: int,
        interval: float,
        publish: Callable[[Event], object],
        follower: StepFollower,
        diagnostics: Diagnostics,
        on_children: Callable[[int, Sequence[ChildReading]], object] = lambda *_: None,
        is_told: Callable[[Mapping[str, Binding]], bool] = lambda _: True,
    ) -> None:
        self._trainer = trainer
        self._tree = ProcessTree(trainer, leave_out=ARGUMENTS)
        self._machine = machine_memory()
        self._interval = interval
        self._publish = publish
        self._follower = follower
        self._diagnostics = diagnostics
        self._due = self._not_before = self._children_not_before = time.monotonic()
        self._step_rate = _StepRate()
        self._free = _FIRST
        self._on_children = on_children
        self._is_told = is_told
        self._nvml = Nvml(diagnostics)
        self._children_rate = _StepRate()
        self._children: Sequence[ChildReading] = ()

    @property
    def pause(self) -> float:
        """Seconds to wait before the next `sample_if_due`; less than the interval if steps are fast."""
        return _LOOK if self._step_rate.is_fast(self._interval) else self._interval

    def sample_if_due(self) -> None:
        """Publish a new sample if the interval has passed or enough steps were made. Never raises."""
        now = time.monotonic()
        if now < self._not_before:
            if self._children and now >= self._children_not_before:
                with self._diagnostics.contained("reading the child processes"):
                    self._read_children(now)
            return
        with self._diagnostics.contained("sampling the process tree"):
            by_steps = self._step_rate.update(self._follower.look(), now)
            if (by_steps or now >= self._due) and self._is_told(self._follower.bindings):
                self._due = now + self._interval
                before = time.thread_time()
                sample = self._read()
                self._publish(sample)
                self._step_rate.sampled()
                self._children = sample.children
                self._not_before = now + self._shortest_pause(time.thread_time() - before)
                self._children_not_before = now + _LOOK

    def sample_short_run(self) -> None:
        """Publish a sample if the run has steps, but `sample_if_due` has seen no step. Never raises."""
        with self._diagnostics.contained("sampling the process tree"):
            if self._follower.look() is not None and not self._step_rate.has_begun:
                self._publish(self._read())

    def sample_now(self) -> None:
        """Publish a sample, unless the newest step already has one. Never raises."""
        with self._diagnostics.contained("sampling the process tree"):
            is_new = self._step_rate.is_new(self._follower.look())
            if is_new and self._is_told(self._follower.bindings):
                self._publish(self._read())
                self._step_rate.sampled()

    def _read_children(self, now: float) -> None:
        """Read the child processes again if enough steps have passed."""
        before = time.thread_time()
        step = self._follower.look()
        if step is not None and self._children_rate.update(step, now):
            self._children = read_again(self._children)
            self._on_children(step, self._children)
            self._children_rate.sampled()
        self._children_not_before = now + max(_LOOK, (time.thread_time() - before) / _SHARE)

    def _shortest_pause(self, cost: float) -> float:
        """Return the minimum seconds to the next sample, if the last one took ``cost`` processor seconds."""
        free = min(cost, self._free)
        self._free -= free
        return min(max(_LOOK, (cost - free) / _SHARE), self._interval)

    def _read(self) -> Sample:
        tree = self._tree.read()
        group = read_cgroup(self._trainer)
        return Sample(
            time_us=now_us(),
            step=self._follower.step,
            tree_pss=tree.pss,
            tree_processes=tree.processes,
            available=available_memory(),
            cgroup_used=group.used,
            cgroup_limit=group.limit,
            tree_file=tree.file,
            children=tree.children,
            children_shared=tree.children_shared,
            host_limit=memory_limit(group.limit, self._machine),
            devices=self._follower.devices.read(
                self._nvml, self._trainer, [child.pid for child in tree.children]
            ),
            tree_swap=tree.swap,
        )


class _StepRate:
    """Speed of the trainer's steps, and the number of steps after which a sample is due."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._newest = self._sampled = 0
        self._seen = 0.0
        self._a_second = 0.0

    def update(self, step: int | None, now: float) -> bool:
        """Note the newest step; return whether enough steps have passed since the last sample."""
        if step is None:
            return False
        begins = self._first is None
        if self._first is None:
            self._first = step
            self._a_second = math.inf  # unknown until the next call, which is made soon
        elif now > self._seen:
            self._a_second = (step - self._newest) / (now - self._seen)
        self._newest, self._seen = step, now
        return begins or step - self._sampled >= self._wanted

    @property
    def has_begun(self) -> bool:
        """True if `update` has got a step. The first step always makes a sample due."""
        return self._first is not None

    def is_new(self, step: int | None) -> bool:
        """Return whether ``step``, the newest step, has no sample yet. Later steps count from there."""
        if step is None or (self._first is not None and step == self._sampled):
            return False
        self._first, self._newest = step if self._first is None else self._first, step
        return True

    def sampled(self) -> None:
        """Note that a sample of the newest step was taken."""
        self._sampled = self._newest

    def is_fast(self, interval: float) -> bool:
        """Return True if the steps make a sample due within ``interval`` seconds."""
        return self._a_second * interval >= self._wanted

    @property
    def _wanted(self) -> int:
        return max(_STEPS, (self._newest - (self._first or 0)) // _PART)
