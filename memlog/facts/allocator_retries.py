"""Finding about a device's allocator that must free its cache again and again to get memory.

If the device has no memory left for a request, the caching allocator waits for the device, returns its unused
blocks to the driver, and tries again: a retry. The blocks must then be taken again. So steps with retries are
slow, and memory is nearly full, or in pieces that don't fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from memlog._internal.terminal import format_bytes
from memlog.events import Batch, Device, DeviceReading, Event, Finding, now_us
from memlog.probes.process import has_expandable_segments

_STEPS: Final = 5
"""Minimum number of steps with a retry. A single retry, as after an evaluation, is no problem."""
_WITHIN: Final = 500
"""Maximum number of steps between the first and the last of `_STEPS` steps with a retry. Rarer retries cost
hardly any time."""
_AGAIN: Final = 10
"""Factor. A finding is published again, with the newest figures, if the number of retries has grown by it."""
_MOSTLY_UNUSED: Final = 0.5
"""Share of the reserved memory. If tensors never held as much at a time, a single retry is a finding: most of
the device is in pieces that don't fit, and the next request can fail."""
_IN_USE: Final = 0.85
"""Share of the reserved memory. If tensors never held as much at a time, the rest was in pieces that did not
fit: fragmentation. Otherwise memory was too small."""


class AllocatorRetries:
    """Subscriber that publishes a finding about each device whose allocator frees its cache again and again.

    ``publish`` is called with the findings.
    """

    def __init__(self, publish: Callable[[Event], object]) -> None:
        self._publish = publish
        self._devices: dict[str, _Device] = {}
        self._settings: dict[str, str | None] = {}

    def __call__(self, event: Event) -> None:
        if type(event) is Device:
            self._settings[event.name] = event.allocator
        elif type(event) is Batch:
            for reading in event.devices:
                device = self._devices.get(reading.name)
                if device is None:
                    self._devices[reading.name] = _Device(reading)
                elif reading.retries == device.newest.retries:
                    device.newest = reading
                elif reading.retries is not None:
                    self._take(event.step, reading, device)

    def finish(self) -> None:
        """Publish the newest figures of each finding."""
        for name, device in self._devices.items():
            if device.reported and device.retries > device.reported:
                self._report(name, device)

    def _take(self, step: int, reading: DeviceReading, device: _Device) -> None:
        device.take(step, reading)
        is_due = device.retries >= max(_AGAIN * device.reported, 1)
        if is_due and (device.is_often or device.is_mostly_unused):
            self._report(reading.name, device)

    def _report(self, name: str, device: _Device) -> None:
        device.reported = device.retries
        self._publish(device.finding(name, self._settings.get(name)))


class _Device:
    def __init__(self, newest: DeviceReading) -> None:
        self.newest = newest
        self.retries = self.reported = 0
        self._steps: deque[int] = deque(maxlen=_STEPS)
        """The newest steps with a retry."""
        self._since = 0
        self._reserved = self._in_use = 0
        """Highest number of bytes that the allocator reserved for general use, and that tensors held, before
        and after retries."""

    def take(self, step: int, reading: DeviceReading) -> None:
        """Take the reading at the end of a step in which the count of retries changed."""
        before, self.newest = self.newest, reading
        new = _counted(reading) - _counted(before)
        # The difference stays 0 if each new retry was followed by a failed allocation.
        if new > 0:
            self.retries += new
            self._since = self._since if self._steps else step
            self._steps.append(step)
            for measured in (before, reading):
                general = (measured.reserved or 0) - (measured.private_pools or 0)
                self._reserved = max(self._reserved, general)
                self._in_use = max(self._in_use, measured.peak or 0, measured.allocated or 0)

    @property
    def is_often(self) -> bool:
        """True if the newest steps with a retry are many, and close together."""
        steps = self._steps
        return len(steps) == _STEPS and steps[-1] - steps[0] <= _WITHIN

    @property
    def is_mostly_unused(self) -> bool:
        return self._in_use < _MOSTLY_UNUSED * self._reserved

    def finding(self, name: str, settings: str | None) -> Finding:
        is_fragmented = self._in_use < _IN_USE * self._reserved
        reason = "free memory is in pieces that don't fit" if is_fragmented else "memory is full"
        often = f"{self.retries} times since" if self.retries > 1 else "once, at"
        return Finding(
            time_us=now_us(),
            step=self._steps[-1],
            kind="allocator_retries",
            title=f"The allocator of {name} had to free its cache {often} step {self._since:,}: {reason}",
            where=name,
            since_step=self._since,
            rate=None,
            forecast=None,
            limit=None,
            evidence=(
                "Before each of these retries, the device had no memory for a request "
                "(num_alloc_retries). A retry waits for the device and gives memory back to the driver, "
                "so it takes time.",
                f"The allocator reserved up to {format_bytes(self._reserved)}. Tensors held up to "
                f"{format_bytes(self._in_use)} at a time.",
            ),
            confidence="high",
            remedy=against_fragmentation(name, settings) if is_fragmented else _AGAINST_FULL,
        )


_AGAINST_FULL = (
    "Make steps a little smaller: by a smaller batch with gradient accumulation, or by activation "
    "checkpointing."
)


def _counted(reading: DeviceReading) -> int:
    """Return the number of retries after which the request succeeded.

    Torch counts a retry before each failed allocation, too.
    """
    return (reading.retries or 0) - (reading.ooms or 0)


def against_fragmentation(device: str, settings: str | None) -> str:
    """Return the remedy for fragmentation. ``settings`` are those of the device's allocator, if known."""
    if device.startswith("cuda") and not has_expandable_segments(settings):
        return (
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF), "
            "or make the sizes of inputs vary less."
        )
    return (
        "Make the sizes of tensors vary less: pad inputs to a few lengths, and make tensors that stay alive "
        "before those of the steps."
    )
