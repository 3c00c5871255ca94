"""Detection of a failed allocation on a CUDA device before the stack unwinds, and the allocator's snapshot.

torch's observer of failed allocations can't be undone. It initialises CUDA, so memlog calls it only
after the program has initialised CUDA. So each process attaches one function,
the dispatcher, which calls the current run's `AllocatorWatch`. torch calls the dispatcher on the allocating
thread and then raises ``OutOfMemoryError``. The allocator's lock is released during the call. An exception
in the dispatcher would replace ``OutOfMemoryError``. The dispatcher must not allocate memory on the device.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.import_hook import ImportWatch
from memlog.events import Artifact, Device, DeviceState, Event, OutOfMemory, now_us
from memlog.inputs.step_inputs import inputs_of_failure
from memlog.journal import RunDirectory
from memlog.journal.artifacts import keep
from memlog.oom import errors
from memlog.oom.circumstances import Circumstances, circumstances, current_frames, locate
from memlog.oom.device_state import device_state, tightest_limit
from memlog.oom.errors import (
    BatchSizeFinders,
    complete,
    describe,
    failed_allocation,
    is_of_a_device,
    shown_error,
)
from memlog.probes.accelerator import CudaBackend
from memlog.probes.machine import available_memory, shares_host
from memlog.probes.nvml import Nvml
from memlog.probes.process import segments_without_history
from memlog.torchside.loaded import (
    attach_out_of_memory_observer,
    cuda_snapshot,
    first_output_shape,
    records_history,
    running_node,
)

FILE = "out-of-memory.pickle"
KIND = "snapshot"


def allocator_snapshot(*, tracing: bool) -> Any:
    """Return torch's snapshot of the allocator; ``None`` if no snapshot is taken.

    The call allocates no device memory.

    If torch records a history of allocations while memlog does not trace the current step, the user has
    started the recording. The user's history can have millions of entries, so the snapshot is taken without
    the history. If this version of torch can't leave out the history, no snapshot is taken.
    """
    torch: Any = sys.modules["torch"]
    if tracing or not records_history(torch):
        return cuda_snapshot(torch)
    segments = segments_without_history(torch)
    return None if segments is None else {"segments": segments, "device_traces": []}


def keep_snapshot(run: RunDirectory, snapshot: Any) -> Artifact:
    """Write a snapshot into the run's folder. An earlier snapshot in the folder is replaced.

    Raises:
        OSError: The file can't be written.
    """
    from memlog.trace.exporters import write_pickle  # noqa: PLC0415 - only a failed allocation needs it

    for history in snapshot["device_traces"]:
        for entry in history:
            entry.setdefault("frames", [])  # required by PyTorch's memory viewer page
    with TemporaryDirectory() as folder:
        return keep(run, write_pickle(snapshot, Path(folder) / FILE), FILE, KIND)


_SNAPSHOTS = 3
"""Maximum number of times that a run saves a snapshot. Each snapshot replaces the previous one. There is a
maximum because a search for the largest batch size fails many times."""
_TORCH_CUDA = "torch.cuda"
_REMEMBERED = 8
"""Number of failures to remember until the run's end."""

_watch: AllocatorWatch | None = None
_attached = False
_queued = False
"""True if torch has been asked to attach the current watch when it initialises CUDA."""


@dataclass(eq=False)
class AllocatorWatch:
    """Publisher of an `OutOfMemory` event when an allocation on a CUDA device fails.

    After `begin`, the object attaches itself to torch as soon as the program has initialised CUDA. So it sees
    the failures of the first step, too. If this version of torch does not report that CUDA is initialised,
    the object attaches itself when the run's first CUDA device is reported (`memlog.events.Device`): call it
    with each event of the run.
    """

    _publish: Callable[[Event], object]
    _step: Callable[[], int | None]
    _diagnostics: Diagnostics
    _run: RunDirectory
    _tracing: Callable[[], bool]
    _failures: deque[OutOfMemory] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED), init=False
    )
    """Newest failures that `failed` has seen. They may have been caught."""
    _exit: OutOfMemory | None = field(default=None, init=False)
    """Failure that the program was handling as it called ``sys.exit``."""
    _snapshots: int = field(default=0, init=False)
    _nvml: Nvml = field(init=False)
    _import: ImportWatch | None = field(default=None, init=False)
    _generation: int = field(default_factory=lambda: processes.generation, init=False)

    def __post_init__(self) -> None:
        self._nvml = Nvml(self._diagnostics)
        self._finders = BatchSizeFinders(self._caught, self._diagnostics)

    def begin(self) -> None:
        """Attach the object to torch as soon as torch is imported and CUDA is initialised."""
        if _TORCH_CUDA in sys.modules:
            self._attach_after_start(sys.modules[_TORCH_CUDA])
        else:
            self._import = ImportWatch(_TORCH_CUDA, callback=self._attach_after_start)
        self._finders.begin()

    def _attach_after_start(self, torch_cuda: Any) -> None:
        global _watch, _queued  # noqa: PLW0603 - the current watch; one call a process
        with self._diagnostics.contained("watching for failed allocations"):
            _watch = self
            call_later = getattr(torch_cuda, "_lazy_call", None)
            # torch keeps the call until CUDA is initialised, in many programs for ever.
            if call_later is not None and (torch_cuda.is_initialized() or not _queued):
                _queued = True
                call_later(_attach_current)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Device) and event.name.startswith("cuda"):
            with self._diagnostics.contained("watching for failed allocations"):
                _attach(self)

    def run_ended(self, error: BaseException | None) -> None:
        """Publish an event if a failed allocation ended the run. Never raises.

        If `failed` has seen this failure, the event repeats what is known of it, and adds torch's message. If
        the program caught the failure, and another error ended the run, the event says that. An exit with an
        error code is no other error, if no step was completed after the failure.
        """
        with self._diagnostics.contained("describing what ended the run"):
            step = self._step()
            failed, seen = failed_allocation(error), self._failures
            if failed is not None:
                self._publish(complete(describe(failed, step, error), seen))
            elif error is not None and seen and seen[-1].step == step:
                if not isinstance(error, SystemExit):
                    self._publish(replace(seen[-1], caught=True, raised_as=shown_error(error)))
                elif error.code:
                    self._publish(self._exit or seen[-1])

    def _caught(self, error: BaseException, batch: int | None) -> None:
        """Publish an event for a failure that a search for a batch size has caught.

        If `failed` has seen this failure, the event repeats what is known of it.
        """
        failed = failed_allocation(error)
        if failed is not None and processes.generation == self._generation:
            event = describe(failed, self._step(), error)
            if is_of_a_device(failed):
                event = complete(event, self._failures)
            self._publish(replace(event, batch=batch))

    def _exits(self, error: SystemExit) -> bool:
        """Return True if the program exits without a complete step after a failed allocation."""
        is_of_failure = False
        with self._diagnostics.contained("describing what ended the run"):
            step, seen = self._step(), self._failures
            is_of_failure = bool(seen) and seen[-1].step == step
            is_of_failure = is_of_failure and processes.generation == self._generation
            # Only its description is kept: the exception would keep the failed step's tensors.
            failed = failed_allocation(sys.exc_info()[1])
            if is_of_failure and failed is not None:
                self._exit = complete(describe(failed, step, error), seen)
        return is_of_failure

    def stop(self) -> None:
        global _watch  # noqa: PLW0603 - the current watch
        if self._import is not None:
            self._import.remove()
        errors.stop()
        self._finders.stop()
        if _watch is self:
            _watch = None

    def failed(self, device: int, requested: int, allowed: int, free: int) -> None:
        """Publish an event for a failed allocation, and save the allocator's snapshot. Never raises.

        ``device`` is the device's index. ``allowed`` is the number of bytes of the device that torch allows
        the process, and ``free`` the number of free bytes of the whole device.
        """
        if processes.generation != self._generation:
            return  # a forked copy: the run belongs to the parent process
        with self._diagnostics.contained("describing a failed allocation"):
            event = self._event(device, requested, allowed, free)
            self._failures.append(event)
            self._publish(event)
            errors.watch(self._exits)
        with self._diagnostics.contained("keeping the allocator's snapshot"):
            self._keep_snapshot()

    def _event(self, device: int, requested: int, allowed: int, free: int) -> OutOfMemory:
        torch: Any = sys.modules["torch"]
        frames = current_frames(__file__)
        layer, phase = locate(frames)
        phase = phase or ("backward" if _node() else None)
        inputs, node = inputs_of_failure(frames), running_node()
        figures = CudaBackend().figures(torch, device)
        total = int(torch.cuda.get_device_properties(device).total_memory)
        shared = shares_host(torch, "cuda", device)
        if shared:
            left = total - (figures.reserved or 0)
            free = min(available_memory() or free, left)
        limit = tightest_limit(total, free, allowed, figures.reserved, shared=shared)
        state = device_state(
            torch,
            device,
            total,
            free,
            figures.reserved,
            self._nvml,
            self._diagnostics,
            requested=requested,
            allowed=allowed,
            shared=shared,
        )
        event = OutOfMemory(
            time_us=now_us(),
            step=self._step(),
            device=f"cuda{device}",
            requested=requested,
            free=limit.free,
            limit=limit.size,
            limited_by=limit.name,
            allocated=figures.allocated,
            reserved=figures.reserved,
            layer=layer or _node(),
            phase=phase,
            message="CUDA out of memory",
            machine=total,
            inputs=inputs,
            batch=None if inputs or node is None else _batch_of_graph(node),
            state=state,
        )
        try:
            return _under(circumstances(torch, frames, phase, device, requested), event, state)
        except Exception as error:  # noqa: BLE001 - the figures are published without it
            self._diagnostics.fault("looking for what the program was doing", error)
            return event

    def _keep_snapshot(self) -> None:
        if self._snapshots < _SNAPSHOTS:
            self._snapshots += 1
            snapshot = allocator_snapshot(tracing=self._tracing())
            if snapshot is not None:
                self._publish(keep_snapshot(self._run, snapshot))


def _under(found: Circumstances, event: OutOfMemory, state: DeviceState) -> OutOfMemory:
    return replace(
        event,
        state=replace(state, model=found.model),
        line=found.line,
        thread=found.thread,
        gradients=found.gradients,
        activity=found.doing.activity,
        subject=found.doing.subject,
        size=found.doing.size,
        held=found.held,
        graph=found.graph,
    )


def _attach(watch: AllocatorWatch) -> None:
    global _watch, _attached  # noqa: PLW0603 - one dispatcher a process
    _watch = watch
    torch: Any = sys.modules["torch"]
    # Other allocators, such as `backend:cudaMallocAsync`, call no observer. Their failures are described from
    # the exception that ends the run.
    if not _attached and torch.cuda.get_allocator_backend() == "native":
        attach_out_of_memory_observer(torch, _dispatch)
        _attached = True


def _attach_current() -> None:
    """Attach the current watch. torch calls this function when it has initialised CUDA."""
    watch = _watch
    if watch is not None:
        with watch._diagnostics.contained("watching for failed allocations"):  # noqa: SLF001 - same file
            _attach(watch)


def _dispatch(device: int, requested: int, allowed: int, free: int) -> None:
    watch = _watch
    if watch is not None:
        watch.failed(device, requested, allowed, free)


def _node() -> str | None:
    """Return ``unknown, in NODE`` for an unknown layer. ``NODE`` is the autograd node of this thread.

    Return ``None`` if the thread runs no node, or if this version of torch can't name the node.
    """
    node = running_node()
    return None if node is None else f"unknown, in {node.name()}"


_MOST_NODES = 10_000
"""If a graph has more nodes than this, its batch size is unknown."""
_MOST_COPIES = 3
"""Maximum number of transposes and copies of a parameter, one of another, that are recognised."""


def _batch_of_graph(node: Any) -> int | None:
    """Return the batch size of a backward pass that has reached an autograd node; ``None`` if unknown.

    It is the first dimension of what the model's first operations returned, if they agree. These operations
    have only parameters and inputs as arguments. Their nodes run last, so they are still there. The inputs
    may be gone, if no variable refers to them.
    """
    waiting, nodes = [node], dict[int, Any]()
    while waiting and len(nodes) <= _MOST_NODES:
        inner = waiting.pop()
        if id(inner) not in nodes:
            nodes[id(inner)] = inner
            waiting += _before(inner)
    first = [each for each in nodes.values() if _is_first(each)]
    sizes = {shape[0] for shape in map(first_output_shape, first) if shape}
    return sizes.pop() if len(sizes) == 1 and not waiting else None


def _before(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions if before is not None]


def _is_first(node: Any) -> bool:
    arguments = _before(node)
    return bool(arguments) and all(map(_is_of_parameter, arguments)) and not _is_of_parameter(node)


def _is_of_parameter(node: Any) -> bool:
    """Return whether a node gives a parameter's gradient, or is of a parameter's transpose or copy."""
    size = prod(first_output_shape(node))
    for _ in range(_MOST_COPIES):
        if not node.next_functions:
            return True
        before = _before(node)
        if len(before) != len(node.next_functions) or len(before) > 1:
            return False
        node = before[0]
        if prod(first_output_shape(node)) != size:
            return False
    return not node.next_functions
