"""Storages that are live in a window on the CPU, and which of them are the model's."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memlog.torchside import internals
from memlog.trace.encoding import (
    BACKWARD,
    BEFORE,
    BUFFER,
    COMMUNICATION,
    FREE,
    GRADIENT,
    INPUT,
    OPTIMIZER_STATE,
    OTHER,
    OUTSIDE,
    PARAMETER,
    UNDECIDED,
    UNSHARDED,
    USES,
)
from memlog.trace.records import HALF, HALF_BY_SLOW_CONVOLUTION, HALF_NOW, UNKNOWN_TYPE
from memlog.tracer.engines.autocast_types import type_of
from memlog.tracer.engines.simulated_step import SIMULATED
from memlog.tracer.engines.storage_events import (
    AllocationOwner,
    EventLog,
    StorageEvents,
    TrackedStorage,
)
from memlog.tracer.module_names import ModuleNames
from memlog.tracer.owners import ParameterOwners, bucket_sizes
from memlog.tracer.tensor_storages import (
    has_bytes,
    is_wrapper,
    optimizer_tensors,
    parameters_of,
    plain_tensors,
    storage_tensors,
)

MOST_LIVE = 12_500
"""Number of tracked storages at which the tracer stops adding storages smaller than `SMALL_STORAGE`. Each
tracked storage costs about 700 bytes of memory, during the trace and its analysis together."""
SMALL_STORAGE = 64 * 1024
"""Size in bytes. If `MOST_LIVE` storages are tracked already, the tracer ignores new storages below this
size. The tracer's own memory is thus at most 8.8 MB plus 1 % of the live bytes."""

_BEFORE = AllocationOwner(OUTSIDE, BEFORE, 0)


class LiveStorages:
    """Tracker of live storages. It writes the events of these storages.

    Args:
        fakes: True to count fake tensors as if they had memory.
        types: True to track the types of storages under autocast.

    Attributes:
        omitted: Number of times a small storage was not tracked.
        sparse, complex, nested: True if a tensor of this kind was seen.
        serial: Serial number of the newest storage or workspace.
        streams: Streams of the storages that an estimate allocates for another stream than the usual one, by
            the storages' serial numbers.
    """

    def __init__(self, log: EventLog, *, fakes: bool = False, types: bool = False) -> None:
        self._fakes = fakes
        self._types = types
        self.omitted = 0
        self.sparse = self.complex = self.nested = False
        self._tracked: dict[int, TrackedStorage] = {}
        self.serial = 0
        self.events = StorageEvents(log)
        self._on_free = self.events.finalizer(self._tracked)
        self._closed = False
        self._places: dict[int, Any] = {}
        self.streams: dict[int, int] = {}
        self._made_as = UNDECIDED

    def elsewhere(self) -> set[int]:
        """Return the serial numbers of storages and workspaces that are not on the traced device."""
        if SIMULATED.placement is None:
            return set()
        is_elsewhere = SIMULATED.placement.is_elsewhere
        return {serial for serial, place in self._places.items() if is_elsewhere(place)}

    def close(self) -> None:
        """Stop tracking. Write how operations used the storages that are still live."""
        self.events.write_pending()
        self._closed = True
        # A list, because a finalizer can change the dictionary during the loop.
        for tracked in list(self._tracked.values()):
            if tracked.cast_first or tracked.type in (HALF, HALF_BY_SLOW_CONVOLUTION, HALF_NOW):
                self.events.use(tracked, USES)
            # Without a serial number, the finalizer writes no FREE event.
            tracked.serial = -1
        self._tracked.clear()

    @contextmanager
    def made_as(self, category: int) -> Iterator[None]:
        """Inside the block, put new storages into a category."""
        before, self._made_as = self._made_as, category
        try:
            yield
        finally:
            self._made_as = before

    def track(
        self, tensor: Tensor, owner: AllocationOwner, instead: TrackedStorage | None = None
    ) -> None:
        """Record the storage of a tensor that an operation has returned, if the storage is new.

        ``instead``: Older storage that the new storage may replace. If the next event frees the older
        storage, both storages count as one.
        """
        for plain in plain_tensors(tensor):
            if plain.is_cpu and not self._is_omitted(plain):
                storage = plain.untyped_storage()
                # An operation can also return a known storage, such as an argument's.
                if storage._cdata not in self._tracked:
                    kind = self._type_of(plain)
                    self._add(storage, owner, UNDECIDED, kind, instead)
                    self.complex = self.complex or plain.is_complex()
                    self.nested = self.nested or plain.is_nested
            if plain is not tensor and tensor.layout is not torch.strided:
                self.sparse = True

    def track_existing(self, tensor: Tensor) -> None:
        """Track a tensor's storage as allocated before the trace, unless the storage is tracked already.

        Leave out a storage on memory that torch did not allocate.
        """
        for plain in plain_tensors(_counted(tensor)):
            if plain.is_cpu and not self._is_omitted(plain):
                storage = plain.untyped_storage()
                if storage._cdata not in self._tracked and not self.is_foreign(storage):
                    self._add(storage, _BEFORE, OTHER, self._type_of(plain))

    def is_foreign(self, storage: Any) -> bool:
        """Return whether a storage lies on memory that torch did not allocate, such as numpy's."""
        return not (self._fakes or storage.resizable())

    def tracked(self, tensor: Tensor) -> TrackedStorage | None:
        """Return the tracked storage of a tensor; ``None`` if the tensor's storage is not tracked."""
        tensor = _counted(tensor)
        if tensor.layout is not torch.strided or is_wrapper(type(tensor)):
            return None
        return self._tracked.get(tensor.untyped_storage()._cdata)

    def add_workspace(
        self,
        sizes: Iterable[int],
        owner: AllocationOwner,
        made: int,
        open_blocks: tuple[tuple[int, int], ...] = (),
        *,
        first: bool = False,
    ) -> tuple[tuple[int, int], ...]:
        """Record that an operation allocated and freed bytes in addition to its results.

        Args:
            sizes: Bytes of the allocations (positive) and of the frees (negative), in order.
            owner: Layer, phase and thread of the operation.
            made: Type of these bytes under autocast.
            open_blocks: Blocks that the operation allocated before its results: serial number and bytes.
            first: True if the operation's results are not tracked yet.

        Returns:
            The blocks that are not freed yet.
        """
        if self._closed:
            return ()
        live, changes = list(open_blocks), []
        for size in sizes:
            if size > 0:
                self.serial += 1
                if SIMULATED.placement is not None:
                    self._places[self.serial] = SIMULATED.placement.of_operation()
                live.append((self.serial, size))
                changes.append((self.serial, size))
            else:
                block = next(open_block for open_block in reversed(live) if open_block[1] == -size)
                live.remove(block)
                changes.append((block[0], 0))
        if changes and first:
            self.events.write_pending()
        if changes:
            self.events.workspace(changes, owner, made)
        return tuple(live)

    def add_compiled(
        self,
        sizes: Sequence[int] | None,
        results: Iterable[Tensor],
        frees: Sequence[tuple[int, bytes]],
        owner: AllocationOwner,
    ) -> bool:
        """Record what one call of compiled code allocated and freed; return whether all of it is known.

        Args:
            sizes: Bytes of the allocations (positive) and frees (negative), in order. A 0 stands for the free
                of a tracked storage. ``None``: unknown.
            results: Tensors that the code returned.
            frees: FREE events of the tracked storages, each with its bytes, in order.
            owner: Layer, phase and thread of the code.
        """
        new = {
            storage._cdata: (storage, self._type_of(plain))
            for tensor in results
            for plain in plain_tensors(tensor)
            if plain.is_cpu and (storage := plain.untyped_storage())._cdata not in self._tracked
        }
        tracked_frees = iter(frees)
        made = (storage.nbytes() for storage, _ in new.values())
        ends, live = _pairs(sizes or (), (size for size, _ in frees), made)
        kept: dict[int, tuple[Any, int]] = {}
        for pointer, (storage, _) in list(new.items()):
            # The allocator's events name no storages. So a live allocation of the same size counts as the
            # result's.
            at = next((at for at in live if live[at] == storage.nbytes()), None)
            if at is not None:
                kept[at] = new.pop(pointer)
                del live[at]
        serials: dict[int, int] = {}
        for at, size in enumerate(sizes or ()):
            if at in kept:
                self._add(kept[at][0], owner, UNDECIDED, kept[at][1])
            elif size > 0:
                self.serial = serials[at] = self.serial + 1
                self.events.workspace([(self.serial, size)], owner, UNKNOWN_TYPE)
            elif at in ends:
                self.events.workspace([(serials[ends[at]], 0)], owner, UNKNOWN_TYPE)
            elif size == 0:
                self.events.write(next(tracked_frees, (0, b""))[1])
        self.events.write(b"".join(event for _, event in tracked_frees))
        self.events.workspace([(serials[at], 0) for at in live], owner, UNKNOWN_TYPE)
        for storage, kind in new.values():
            self._add(storage, owner, UNDECIDED, kind)
        return sizes is not None and not live and not new

    def track_resized(self, storage: Any, owner: AllocationOwner) -> None:
        """Record the new size of a storage, if the size has changed."""
        tracked = self._tracked.get(storage._cdata)
        category, kind = UNDECIDED, UNKNOWN_TYPE
        if tracked is not None:
            if tracked.size == storage.nbytes():
                return
            category, kind = tracked.category, tracked.type
            del self._tracked[tracked.pointer]
            self.events.write_pending()
            self.events.use(tracked, FREE)
            # Without a serial number, the finalizer writes no second FREE event.
            tracked.serial = -1
        self._add(storage, owner, category, kind)

    def track_changed(
        self, tensors: Iterable[Tensor], owner: AllocationOwner, *, written: bool
    ) -> None:
        """Record the new sizes of storages. ``written``: True if an operation wrote to a sparse tensor."""
        self.sparse = self.sparse or written
        for tensor in tensors:
            if tensor.is_cpu:
                self.track_resized(tensor.untyped_storage(), owner)

    def classify(self, tensor: Tensor, layer: int, category: int, phase: int = BEFORE) -> bool:
        """Record the category of a tensor's storage; return True if the storage is newly tracked.

        Parameters and buffers keep their categories. Inputs do not become gradients: the sparse gradient of
        an embedding contains the input tokens. If torch did not allocate an input's memory (for example,
        numpy did), the input is not tracked.

        A newly tracked storage counts as made in ``phase``. If the storage is larger than the tensor, the
        storage counts as made before the trace.
        """
        added = False
        for plain in storage_tensors(_counted(tensor)):
            if not plain.is_cpu:
                continue
            storage = plain.untyped_storage()
            tracked = self._tracked.get(storage._cdata)
            if tracked is None:
                foreign = category == INPUT and self.is_foreign(storage)
                if not foreign and not self._is_omitted(plain):
                    made = phase if plain.nbytes == storage.nbytes() else BEFORE
                    kind, owner = self._type_of(plain), AllocationOwner(layer, made, 0)
                    added = self._add(storage, owner, category, kind) or added
            elif tracked.category != category and not _is_final(tracked.category, category):
                tracked.category = category
                self.events.category(tracked, layer)
        return added

    def communicated(self, tensors: Iterable[Tensor], sizes: Collection[int]) -> None:
        """Classify older storages of unknown category that a collective reads and writes.

        ``sizes``: Bytes of the buffers for communication. The tensors of a program's own collectives have
        other sizes.
        """
        for tensor in tensors:
            self.track_existing(tensor)
            tracked = self.tracked(tensor)
            if tracked is not None and tracked.category == OTHER and tracked.size in sizes:
                tracked.category = COMMUNICATION
                self.events.category(tracked, OUTSIDE)

    def repeat_category(self, tensor: Tensor, layer: int) -> None:
        """Write the category of a tensor's storage again, at the current time."""
        for plain in storage_tensors(tensor):
            tracked = self._tracked.get(plain.untyped_storage()._cdata) if plain.is_cpu else None
            if tracked is not None:
                self.events.category(tracked, layer)

    def largest(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """Return the serial numbers of the two largest tracked storages of the tensors.

        If there are fewer than two, 0 stands for each missing one.
        """
        sizes = {
            tracked.serial: tracked.size
            for tensor in tensors
            for plain in storage_tensors(_counted(tensor))
            if (tracked := self._tracked.get(plain.untyped_storage()._cdata)) is not None
        }
        first, second, *_ = [*sorted(sizes, key=lambda serial: -sizes[serial]), 0, 0]
        return first, second

    def _type_of(self, tensor: Tensor) -> int:
        return type_of(tensor) if self._types else UNKNOWN_TYPE

    def _is_omitted(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage is too small to be tracked, and count such storages.

        The size is read from the tensor. To read the storage's size would create a Python object that exists
        as long as the storage.
        """
        if len(self._tracked) < MOST_LIVE or tensor.nbytes >= SMALL_STORAGE:
            return False
        self.omitted += 1
        return True

    def _add(
        self,
        storage: Any,
        owner: AllocationOwner,
        category: int,
        kind: int,
        instead: TrackedStorage | None = None,
    ) -> bool:
        size = storage.nbytes()
        if not size or self._closed or not (self._fakes or has_bytes(storage)):
            return False
        category = category or self._made_as  # UNDECIDED is 0
        tracked = TrackedStorage(storage, self._on_free)
        self.serial = serial = self.serial + 1
        tracked.pointer = pointer = storage._cdata
        tracked.serial, tracked.size, tracked.category = serial, size, category
        tracked.type = kind
        tracked.cast_first = tracked.cast_last = tracked.casts = tracked.used = (
            tracked.backward_layer
        ) = 0
        tracked.wide_inside = tracked.outside = tracked.is_gradient = False
        self._tracked[pointer] = tracked
        if (placement := SIMULATED.placement) is not None:
            self._places[serial] = placement.of_storage(storage)
            if placement.stream:
                self.streams[serial] = placement.stream
        self.events.allocation(tracked, owner, instead)
        return True


def _pairs(
    sizes: Sequence[int], tracked_frees: Iterable[int], results: Iterable[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the allocation of each free, and the bytes of each allocation that is left.

    Both are given by their places in ``sizes``.

    The allocator reports the free of a tracked storage, too, if the storage was made while a profiler was on.
    Such a report is told from the free of a newer block by what is left at the end: the results.
    """
    announced = iter(tracked_frees)
    ends: dict[int, int] = {}
    live: dict[int, int] = {}
    reports: list[int] = []
    expected = 0
    for at, size in enumerate(sizes):
        if size > 0:
            live[at] = size
        elif size == 0:
            # The allocator's report of this free can be the next entry.
            expected = next(announced, 0)
            continue
        elif size == -expected:
            reports.append(at)
        else:
            made = next((made for made in reversed(live) if live[made] == -size), None)
            if made is not None:
                ends[at] = made
                del live[made]
        expected = 0
    too_many = Counter(live.values())
    too_many.subtract(results)
    for at in reports:
        made = next((made for made in live if made < at and live[made] == -sizes[at]), None)
        if made is not None and too_many[-sizes[at]] > 0:
            too_many[-sizes[at]] -= 1
            ends[at] = made
            del live[made]
    return ends, live


def _counted(tensor: Tensor) -> Tensor:
    return tensor if SIMULATED.stand_in is None else SIMULATED.stand_in(tensor)


def _is_final(tracked: int, category: int) -> bool:
    return tracked in (PARAMETER, BUFFER, UNSHARDED) or (tracked == INPUT and category == GRADIENT)


class ModelTensors:
    """Classification of the storages that belong to models and optimizers.

    Attributes:
        late_gradients: True if the tracer missed the operation that made a gradient.
        bucket_sizes: Bytes of the buffers for communication.
    """

    def __init__(self, names: ModuleNames, live_storages: LiveStorages) -> None:
        self.late_gradients = False
        self.bucket_sizes: list[int] = []
        self._names = names
        self._owners = ParameterOwners(names)
        self._live_storages = live_storages
        self._stepped = weakref.WeakSet[Any]()

    def find_buckets(self) -> None:
        """Find the sizes of the buffers for communication. Within a backward pass, this never returns."""
        self.bucket_sizes = bucket_sizes(root.module() for root in self._names.roots)

    def add_new_roots(self) -> None:
        """Classify the tensors of root modules that were found since the last call."""
        for tensor, layer, category in self._owners.register_new_roots():
            self._live_storages.classify(tensor, layer, category)

    def add_parameters(self) -> None:
        """Classify all parameters and their gradients again at the window's end.

        Parameters of lazy modules did not exist at the window's begin.
        """
        for parameter, layer in self._owners.parameters():
            self._live_storages.classify(parameter, layer, PARAMETER)
            if parameter.grad is not None:
                self._add_gradient(parameter, parameter.grad)

    def add_optimizer(self, optimizer: Any) -> None:
        """Classify an optimizer's parameters, gradients and state."""
        for parameter in parameters_of(optimizer):
            layer = self._owners.of(parameter)
            if layer == OUTSIDE:  # else the parameter was classified with its module
                self._live_storages.classify(parameter, layer, PARAMETER)
            if parameter.grad is not None:
                self._add_gradient(parameter, parameter.grad)
        self.add_state(optimizer)

    def add_state(self, optimizer: Any) -> None:
        for state in optimizer_tensors(optimizer):
            self._live_storages.classify(
                state.tensor, self._owners.of_state(state), OPTIMIZER_STATE
            )

    def repeat_state(self, optimizer: Any) -> None:
        """Write the category of an optimizer's state again. Later calls for the same optimizer do nothing.

        memlog's predictions assign each state tensor to the optimizer step in which the tensor's category was
        last written.
        """
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            for state in optimizer_tensors(optimizer):
                self._live_storages.repeat_category(state.tensor, self._owners.of_state(state))

    def add_detached(self, out: Any) -> None:
        """Classify a detached tensor if it becomes a parameter's gradient.

        Autograd detaches a gradient to use the gradient as ``parameter.grad`` without a copy.
        """
        if internals.backward_task() == internals.NO_TASK:
            return
        parameter = getattr(internals.current_node(), "variable", None)
        if parameter is not None and isinstance(out, Tensor):
            self._add_gradient(parameter, out)

    def _add_gradient(self, parameter: Any, gradient: Tensor) -> None:
        """Classify ``gradient``, the gradient of ``parameter``.

        An untracked gradient counts as allocated now if ``parameter`` is in a traced module, else
        as allocated before the trace.
        """
        layer = self._owners.of(parameter)
        phase = BEFORE if layer == OUTSIDE else BACKWARD
        if self._live_storages.classify(gradient, layer, GRADIENT, phase) and phase == BACKWARD:
            self.late_gradients = True
