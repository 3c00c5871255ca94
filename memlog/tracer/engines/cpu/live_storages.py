"""Storages that are live in a window on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from memlog.trace.encoding import (
    ALLOC,
    BEFORE,
    BUFFER,
    CLASSIFY,
    FREE,
    GRADIENT,
    INPUT,
    LINE,
    OTHER,
    OUTSIDE,
    PARAMETER,
    TEMPORARY,
    UNDECIDED,
    USES,
    pack,
)
from memlog.trace.storage_uses import HALF, HALF_NOW, MOST_CASTS, UNKNOWN_TYPE, packed
from memlog.tracer.engines.cpu.autocast_types import type_of
from memlog.tracer.event_log import EventLog
from memlog.tracer.tensor_storages import is_wrapper, plain_tensors, storage_tensors

MOST_LIVE = 12_500
"""Maximum number of live storages of any size: about 700 bytes each, including what the analysis keeps."""
SMALL = 64 * 1024
"""Size in bytes below which storages beyond `MOST_LIVE` are not tracked. The tracker thus takes 8.8 MB, plus
at most 1 % of the live bytes."""


class TrackedStorage(weakref.ref[Any]):
    """Weak reference to a live storage, with the data for its FREE event (no closure is needed).

    Attributes:
        type: Type under autocast, as in `memlog.trace.storage_uses`.
        cast_first: Last serial when a product first used the storage; 0: never.
        cast_last: Last serial when a product last used it.
        casts: Number of products in the forward pass that used it.
        used: Last serial when another operation last used it.
        backward_layer: Layer whose backward pass first used it.
        wide_inside: True if it was made in an attention that computes in four bytes.
        outside: True if no module made it.
        is_gradient: True if a backward pass made it.
    """

    __slots__ = (
        "backward_layer",
        "cast_first",
        "cast_last",
        "casts",
        "category",
        "is_gradient",
        "outside",
        "pointer",
        "serial",
        "size",
        "type",
        "used",
        "wide_inside",
    )

    pointer: int
    serial: int
    size: int
    category: int
    type: int
    cast_first: int
    cast_last: int
    casts: int
    used: int
    backward_layer: int
    wide_inside: bool
    outside: bool
    is_gradient: bool

    def use_event(self, kind: int, now: int) -> bytes:
        """Return an event with the uses of the storage, as far as they were analysed."""
        if self.type == UNKNOWN_TYPE:
            return pack(self.serial, 0, now, 0, kind, 0, 0, 0)
        return pack(
            self.serial,
            packed(self.cast_first, self.cast_last, self.used),
            now,
            self.backward_layer,
            kind,
            self.type,
            0,
            min(self.casts, MOST_CASTS),
        )


class _PendingAllocation:
    """A new storage whose allocation is not written yet.

    Attributes:
        instead: Older storage that the new one replaces if the older one is freed next.
        workspace: Events of the operation's workspace.
    """

    def __init__(self, tracked: TrackedStorage, instead: TrackedStorage, event: bytes) -> None:
        self.tracked = tracked
        self.instead = instead
        self.event = event
        self.workspace = b""

    def take_over(self) -> None:
        """Count the two as one storage, the older one."""
        self.tracked.serial, self.tracked.size = self.instead.serial, self.instead.size


class LiveStorages:
    """Tracker of live storages: writes their ALLOC, FREE and CLASSIFY events, each once.

    Args:
        fakes: Whether to count fake tensors as if they had bytes.
        types: Whether to track the types of storages under autocast.

    Attributes:
        omitted: Number of times a small storage was not tracked.
        sparse: True if sparse tensors were seen.
        complex: True if complex tensors were seen.
        nested: True if nested tensors were seen.
        serial: Number of the storage that was tracked last.
        line: Number of the program's line that makes storages now; 0: a module makes them.
    """

    def __init__(self, log: EventLog, *, fakes: bool = False, types: bool = False) -> None:
        self._log = log
        self._fakes = fakes
        self._types = types
        self.omitted = 0
        self.sparse = self.complex = self.nested = False
        self.line = 0
        self._tracked: dict[int, TrackedStorage] = {}
        self.serial = 0
        self._pending: list[_PendingAllocation] = []
        self._on_free = self._finalizer()
        self._closed = False

    def close(self) -> None:
        """Write the uses of the live storages, and stop writing events."""
        self.write_pending()
        self._closed = True
        for tracked in list(self._tracked.values()):
            if tracked.cast_first or tracked.type in (HALF, HALF_NOW):
                self._log.append(tracked.use_event(USES, self._log.now()))
            tracked.serial = -1
        self._tracked.clear()

    def track(
        self,
        tensor: Tensor,
        layer: int,
        phase: int,
        thread: int,
        instead: TrackedStorage | None = None,
    ) -> None:
        """Record the storage of a tensor that an operation has returned, if it is new.

        An untraced step would have written the result into the storage ``instead``. If that is freed before
        anything else happens, the new storage counts as the same one.
        """
        for plain in plain_tensors(tensor):
            if plain.is_cpu and not self._is_omitted(plain):
                storage = plain.untyped_storage()
                if storage._cdata not in self._tracked:
                    kind = self._type_of(plain)
                    self._add(storage, layer, phase, UNDECIDED, thread, kind, instead)
                    self.complex = self.complex or plain.is_complex()
                    self.nested = self.nested or plain.is_nested
            if plain is not tensor and tensor.layout is not torch.strided:
                self.sparse = True

    def track_existing(self, tensor: Tensor) -> None:
        """Track an unknown storage as one from before the trace, unless its memory is not torch's."""
        for plain in plain_tensors(tensor):
            if plain.is_cpu and not self._is_omitted(plain):
                storage = plain.untyped_storage()
                if storage._cdata not in self._tracked and not self.is_foreign(storage):
                    self._add(storage, OUTSIDE, BEFORE, OTHER, 0, self._type_of(plain))

    def is_foreign(self, storage: Any) -> bool:
        """Return whether a storage lies on memory that is not torch's, such as numpy's."""
        return not (self._fakes or storage.resizable())

    def tracked(self, tensor: Tensor) -> TrackedStorage | None:
        """Return the tracked storage of a tensor; ``None`` if there is none."""
        if tensor.layout is not torch.strided or is_wrapper(type(tensor)):
            return None
        return self._tracked.get(tensor.untyped_storage()._cdata)

    def add_workspace(
        self, size: int, layer: int, phase: int, thread: int, made: int = UNKNOWN_TYPE
    ) -> None:
        """Record that an operation allocated and freed ``size`` bytes beside its results."""
        if size > 0 and not self._closed:
            self.serial = serial = self.serial + 1
            now = self._log.now()
            events = pack(serial, size, now, layer, ALLOC, phase, TEMPORARY, thread)
            events += self._made_by(serial, now) + pack(serial, 0, now, 0, FREE, made, 0, 0)
            if self._pending:
                self._pending[-1].workspace = events
            else:
                self._log.append(events)

    def track_resized(self, storage: Any, layer: int, phase: int, thread: int) -> None:
        """Record the new size of a storage, if it has changed."""
        tracked = self._tracked.get(storage._cdata)
        category, kind = UNDECIDED, UNKNOWN_TYPE
        if tracked is not None:
            if tracked.size == storage.nbytes():
                return
            category, kind = tracked.category, tracked.type
            del self._tracked[tracked.pointer]
            self.write_pending()
            self._log.append(tracked.use_event(FREE, self._log.now()))
            tracked.serial = -1
        self._add(storage, layer, phase, category, thread, kind)

    def classify(self, tensor: Tensor, layer: int, category: int, phase: int = BEFORE) -> bool:
        """Record the category of a storage; return True if it was unknown and is added.

        A parameter or buffer keeps its category. So does an input that a gradient holds: the indices of an
        embedding's sparse gradient are the tokens themselves. An argument of the model may lie on memory that
        is not torch's (numpy's, or shared memory of a data loader's workers), and does not count then.

        An unknown storage was made in ``phase``. If the tensor is a part of its storage (of a buffer that
        collects gradients for several ranks), the storage existed before.
        """
        added = False
        for plain in storage_tensors(tensor):
            if not plain.is_cpu:
                continue
            storage = plain.untyped_storage()
            tracked = self._tracked.get(storage._cdata)
            if tracked is None:
                foreign = category == INPUT and self.is_foreign(storage)
                if not foreign and not self._is_omitted(plain):
                    made = phase if plain.nbytes == storage.nbytes() else BEFORE
                    kind = self._type_of(plain)
                    added = self._add(storage, layer, made, category, 0, kind) or added
            elif tracked.category != category and not _is_final(tracked.category, category):
                tracked.category = category
                self._write_category(tracked, layer)
        return added

    def repeat_category(self, tensor: Tensor, layer: int) -> None:
        """Write a storage's category again, at the current time."""
        for plain in storage_tensors(tensor):
            tracked = self._tracked.get(plain.untyped_storage()._cdata) if plain.is_cpu else None
            if tracked is not None:
                self._write_category(tracked, layer)

    def _write_category(self, tracked: TrackedStorage, layer: int) -> None:
        self.write_pending()
        now = self._log.now()
        self._log.append(pack(tracked.serial, 0, now, layer, CLASSIFY, 0, tracked.category, 0))

    def largest(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """Return the serials of the two largest tracked storages of the tensors; 0 for none."""
        found = {
            tracked.serial: tracked.size
            for tensor in tensors
            for plain in storage_tensors(tensor)
            if (tracked := self._tracked.get(plain.untyped_storage()._cdata)) is not None
        }
        first, second, *_ = [*sorted(found, key=lambda serial: -found[serial]), 0, 0]
        return first, second

    def _type_of(self, tensor: Tensor) -> int:
        return type_of(tensor) if self._types else UNKNOWN_TYPE

    def _is_omitted(self, tensor: Tensor) -> bool:
        """Return whether a storage is too small to be tracked.

        Reads the size from the tensor: a storage that Python reads once keeps a Python object for its
        lifetime.
        """
        if len(self._tracked) < MOST_LIVE or tensor.nbytes >= SMALL:
            return False
        self.omitted += 1
        return True

    def _made_by(self, serial: int, now: int) -> bytes:
        return pack(serial, self.line, now, 0, LINE, 0, 0, 0) if self.line else b""

    def write_pending(self) -> None:
        """Write the allocation that waited for its predecessor to be freed: something else happened first."""
        with suppress(IndexError):
            pending = self._pending.pop()
            self._log.append(pending.event + pending.workspace)

    def _add(
        self,
        storage: Any,
        layer: int,
        phase: int,
        category: int,
        thread: int,
        kind: int,
        instead: TrackedStorage | None = None,
    ) -> bool:
        size = storage.nbytes()
        if not size or self._closed or not (self._fakes or _has_bytes(storage)):
            return False
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
        self.write_pending()
        now = self._log.now()
        event = pack(serial, size, now, layer, ALLOC, phase, category, thread)
        if category == UNDECIDED:
            event += self._made_by(serial, now)
        if instead is None:
            self._log.append(event)
        else:
            self._pending.append(_PendingAllocation(tracked, instead, event))
        return True

    def _finalizer(self) -> Callable[[TrackedStorage], None]:
        """Return the callback for freed storages. It may interrupt memlog's own code: one append, no lock."""
        append, now, storages, pending = (
            self._log.append,
            self._log.now,
            self._tracked,
            self._pending,
        )

        def storage_freed(tracked: TrackedStorage) -> None:
            if tracked.serial >= 0:
                if pending:
                    successor = pending.pop()
                    if successor.instead is tracked:
                        successor.take_over()
                        storages.pop(tracked.pointer, None)
                        append(successor.workspace)
                        return
                    append(successor.event + successor.workspace)
                if storages.get(tracked.pointer) is tracked:
                    del storages[tracked.pointer]
                append(tracked.use_event(FREE, now()))

        return storage_freed


def _has_bytes(storage: Any) -> bool:
    """Return whether a storage has memory. Zeros of automatic differentiation have a size, but no memory."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:
        return False  # torch raises for a storage with a size and no memory


def _is_final(tracked: int, category: int) -> bool:
    return tracked in (PARAMETER, BUFFER) or (tracked == INPUT and category == GRADIENT)
