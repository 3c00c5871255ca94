"""Detection of a failed allocation on a CUDA device before the stack unwinds.

``torch._C._cuda_attach_out_of_memory_observer`` can't be undone. So each process attaches one function,
the dispatcher, which calls the current run's `AllocatorWatch`. torch calls the dispatcher on the allocating
thread and then raises ``OutOfMemoryError``. The allocator's lock is released during the call. An exception
in the dispatcher would replace ``OutOfMemoryError``. The dispatcher must not allocate memory on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Device, Event, OutOfMemory, now_us
from memlog.inputs.step_inputs import inputs_of_failure
from memlog.journal import RunDirectory
from memlog.oom.errors import describe, failed_allocation, is_of_a_device
from memlog.oom.frames import current_frames, locate
from memlog.probes._backends import parse_nested

_SNAPSHOTS = 3
"""Maximum number of times that a run saves a snapshot. Each snapshot replaces the previous one. There is a
maximum because a search for the largest batch size fails many times."""

_watch: AllocatorWatch | None = None
_attached = False


@dataclass(eq=False)
class AllocatorWatch:
    """Publisher of an `OutOfMemory` event when an allocation on a CUDA device fails.

    Call the object with each event of the run. When the run's first CUDA device is reported
    (`memlog.events.Device`), the object attaches itself to torch. To attach earlier would initialise CUDA.
    """

    _publish: Callable[[Event], object]
    _step: Callable[[], int | None]
    _diagnostics: Diagnostics
    _run: RunDirectory
    _tracing: Callable[[], bool]
    _failed_at: int | None = field(default=-1, init=False)
    """Last completed step at the newest call of `failed`; ``None``: no step had completed; -1: there was no
    call."""
    _snapshots: int = field(default=0, init=False)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Device) and event.name.startswith("cuda"):
            with self._diagnostics.contained("watching for failed allocations"):
                _attach(self)

    def run_ended(self, error: BaseException | None) -> None:
        """Publish an event if a failed allocation ended the run. Never raises.

        A failure on a device is left out if `failed` was called since the last completed step.
        """
        with self._diagnostics.contained("describing what ended the run"):
            failed = failed_allocation(error)
            if failed is None or (is_of_a_device(failed) and self._failed_at == self._step()):
                return
            self._publish(describe(failed, self._step(), error))

    def stop(self) -> None:
        global _watch  # noqa: PLW0603 - the current watch
        if _watch is self:
            _watch = None

    def failed(self, device: int, requested: int, total: int, free: int) -> None:
        """Publish an event for a failed allocation, and save the allocator's snapshot. Never raises.

        ``device`` is the device's index. ``total`` and ``free`` are bytes of the device's memory.
        """
        with self._diagnostics.contained("describing a failed allocation"):
            self._failed_at = self._step()
            frames = current_frames()
            layer, phase = locate(frames)
            torch: Any = sys.modules["torch"]
            figures = parse_nested(torch._C._cuda_memoryStats(device))  # noqa: SLF001 - the public one is slow
            self._publish(
                OutOfMemory(
                    time_us=now_us(),
                    step=self._step(),
                    device=f"cuda{device}",
                    requested=requested,
                    free=free,
                    limit=total,
                    limited_by="the device's memory",
                    allocated=figures.allocated,
                    reserved=figures.reserved,
                    layer=layer or _node(),
                    phase=phase or ("backward" if _node() else None),
                    message="CUDA out of memory",
                    inputs=inputs_of_failure(frames),
                )
            )
        with self._diagnostics.contained("keeping the allocator's snapshot"):
            self._keep_snapshot()

    def _keep_snapshot(self) -> None:
        # Imported here because only a failing run needs it.
        from memlog.oom.allocator_snapshot import allocator_snapshot, keep_snapshot  # noqa: PLC0415

        if self._snapshots < _SNAPSHOTS:
            self._snapshots += 1
            snapshot = allocator_snapshot(tracing=self._tracing())
            if snapshot is not None:
                self._publish(keep_snapshot(self._run, snapshot))


def _attach(watch: AllocatorWatch) -> None:
    global _watch, _attached  # noqa: PLW0603 - one dispatcher a process
    _watch = watch
    if not _attached:
        torch: Any = sys.modules["torch"]
        torch._C._cuda_attach_out_of_memory_observer(_dispatch)  # noqa: SLF001 - no public way
        _attached = True


def _dispatch(device: int, requested: int, total: int, free: int) -> None:
    watch = _watch
    if watch is not None:
        watch.failed(device, requested, total, free)


def _node() -> str | None:
    """Return ``unknown, in NODE`` for an unknown layer. ``NODE`` is the autograd node of this thread.

    Return ``None`` if the thread runs no node, or if this version of torch can't name the node.
    """
    torch: Any = sys.modules["torch"]
    current = getattr(torch._C, "_current_autograd_node", None)  # noqa: SLF001 - no public way
    node = None if current is None else current()
    return None if node is None else f"unknown, in {node.name()}"
