"""The storages that are live in a window on the CPU, and when they go."""

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
from memlog.tracer.tensor_storages import held_by, is_wrapper, plain_tensors

MOST_LIVE = 12_500
"""Live storages that are all followed: about 700 bytes each, with what the analysis keeps of them."""
SMALL = 64 * 1024
"""Bytes; of more live storages than that, smaller ones are not. So the books take 8.8 MB, and 1 % of what is
live, at most."""


class TrackedStorage(weakref.ref[Any]):
    """Knows a live storage, and, without a closure of its own, what to say when it goes.

    Attributes:
        type: What it would be, as `memlog.trace.storage_uses` has it.
        cast_first: When it was first given to a product, by the serial that was the last then; 0: never.
        cast_last: When last.
        casts: How many products of the forward pass got it.
        used: When another operation got it last.
        asked: The layer whose backward pass got it first.
        wide_inside: Made within an attention that goes back to four bytes.
        outside: Made by no module.
        slope: Made in a backward pass.
    """

    __slots__ = (
        "asked",
        "cast_first",
        "cast_last",
        "casts",
        "category",
        "outside",
        "pointer",
        "serial",
        "size",
        "slope",
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
    asked: int
    wide_inside: bool
    outside: bool
    slope: bool

    def last_word(self, kind: int, now: int) -> bytes:
        """An event that tells what it was used for, as far as anybody has looked."""
        if self.type == UNKNOWN_TYPE:
            return pack(self.serial, 0, now, 0, kind, 0, 0, 0)
        return pack(
            self.serial,
            packed(self.cast_first, self.cast_last, self.used),
            now,
            self.asked,
            kind,
            self.type,
            0,
            min(self.casts, MOST_CASTS),
        )


class _Waiting:
    """A new storage whose allocation is not written yet.

    Args:
        known: It.
        instead: The storage whose place it takes if that is freed next.
        event: Its allocation.

    Attributes:
        passing: What its operation took inside itself, as events.
    """

    def __init__(self, known: TrackedStorage, instead: TrackedStorage, event: bytes) -> None:
        self.known = known
        self.instead = instead
        self.event = event
        self.passing = b""

    def take_over(self) -> None:
        """Count the two as one storage, the older one."""
        self.known.serial, self.known.size = self.instead.serial, self.instead.size


class LiveStorages:
    """Says ALLOC, FREE and CLASSIFY, once each.

    Args:
        log: Where they go.
        fakes: Whether fake tensors, which hold nothing, are counted as if they did.
        types: Whether the types of storages are noted.

    Attributes:
        omitted: How often a small storage was seen that was not followed.
        sparse: Whether sparse tensors were seen.
        complex: Whether complex ones were.
        nested: Whether nested ones were.
        line: The number of the program's line that makes storages now; 0: a module does.
    """

    def __init__(self, log: EventLog, *, fakes: bool = False, types: bool = False) -> None:
        self._log = log
        self._fakes = fakes
        self._types = types
        self.omitted = 0
        self.sparse = self.complex = self.nested = False
        self.line = 0
        self._known: dict[int, TrackedStorage] = {}
        self._serial = 0
        self._waiting: list[_Waiting] = []
        self._gone = self._finalizer()
        self._closed = False

    def close(self) -> None:
        """Nothing is said any more."""
        self.settle()
        self._closed = True
        for known in list(self._known.values()):
            if known.cast_first or known.type in (HALF, HALF_NOW):
                self._log.append(known.last_word(USES, self._log.now()))
            known.serial = -1
        self._known.clear()

    def see(
        self,
        tensor: Tensor,
        layer: int,
        phase: int,
        thread: int,
        instead: TrackedStorage | None = None,
    ) -> None:
        """Record the storage of a tensor that an operation has returned, if it is new.

        Args:
            tensor: The result.
            layer: Its owner.
            phase: In which the operation ran.
            thread: On which.
            instead: The storage that an untraced step would have written the result into. If it is freed
                before anything else happens, the new storage takes its place in the books.
        """
        for plain in plain_tensors(tensor):
            if plain.is_cpu and not self._is_omitted(plain):
                storage = plain.untyped_storage()
                if storage._cdata not in self._known:
                    kind = self._type_of(plain)
                    self._hold(storage, layer, phase, UNDECIDED, thread, kind, instead)
                    self.complex = self.complex or plain.is_complex()
                    self.nested = self.nested or plain.is_nested
            if plain is not tensor and tensor.layout is not torch.strided:
                self.sparse = True

    def meet(self, tensor: Tensor) -> None:
        """What nobody has seen yet of this tensor was there before, but for memory that is not torch's."""
        for plain in plain_tensors(tensor):
            if plain.is_cpu and not self._is_omitted(plain):
                storage = plain.untyped_storage()
                if storage._cdata not in self._known and (self._fakes or storage.resizable()):
                    self._hold(storage, OUTSIDE, BEFORE, OTHER, 0, self._type_of(plain))

    @property
    def serial(self) -> int:
        """That of the storage that was seen last."""
        return self._serial

    def known(self, tensor: Tensor) -> TrackedStorage | None:
        """What is known of the storage that holds a tensor."""
        if tensor.layout is not torch.strided or is_wrapper(type(tensor)):
            return None
        return self._known.get(tensor.untyped_storage()._cdata)

    def passing(
        self, size: int, layer: int, phase: int, thread: int, made: int = UNKNOWN_TYPE
    ) -> None:
        """An operation took ``size`` bytes, if any, beside its results before it returned."""
        if size > 0 and not self._closed:
            self._serial = serial = self._serial + 1
            now = self._log.now()
            events = pack(serial, size, now, layer, ALLOC, phase, TEMPORARY, thread)
            events += self._made_by(serial, now) + pack(serial, 0, now, 0, FREE, made, 0, 0)
            if self._waiting:
                self._waiting[-1].passing = events
            else:
                self._log.append(events)

    def see_resized(self, storage: Any, layer: int, phase: int, thread: int) -> None:
        """A storage may have another size than before."""
        known = self._known.get(storage._cdata)
        category = UNDECIDED
        if known is not None:
            if known.size == storage.nbytes():
                return
            category = known.category
            del self._known[known.pointer]
            self.settle()
            self._log.append(known.last_word(FREE, self._log.now()))
            known.serial = -1
        self._hold(
            storage, layer, phase, category, thread, UNKNOWN_TYPE if known is None else known.type
        )

    def classify(self, tensor: Tensor, layer: int, category: int, phase: int = BEFORE) -> bool:
        """Says what a storage is for.

        What was once known as a parameter or buffer stays one, and an input that a gradient holds, too: the
        indices of an embedding's sparse gradient are the tokens themselves. An argument of the model's may
        lie on memory that is not torch's (numpy's, or what a data loader's workers share), and does not
        count then.

        Args:
            tensor: Whose storage.
            layer: Whose it is.
            category: What it is for.
            phase: In which one was made that nobody has seen yet; a part of something larger (of what
                collects gradients for several ranks) was there before.

        Returns:
            Whether one was met first.
        """
        met = False
        for plain in held_by(tensor):
            if not plain.is_cpu:
                continue
            storage = plain.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is None:
                foreign = category == INPUT and not (self._fakes or storage.resizable())
                if not foreign and not self._is_omitted(plain):
                    made = phase if plain.nbytes == storage.nbytes() else BEFORE
                    kind = self._type_of(plain)
                    met = self._hold(storage, layer, made, category, 0, kind) or met
            elif known.category != category and not _stays(known.category, category):
                known.category = category
                self._tell_category(known, layer)
        return met

    def repeat(self, tensor: Tensor, layer: int) -> None:
        """Say once more what a storage is for, and so when."""
        for plain in held_by(tensor):
            known = self._known.get(plain.untyped_storage()._cdata) if plain.is_cpu else None
            if known is not None:
                self._tell_category(known, layer)

    def _tell_category(self, known: TrackedStorage, layer: int) -> None:
        self.settle()
        now = self._log.now()
        self._log.append(pack(known.serial, 0, now, layer, CLASSIFY, 0, known.category, 0))

    def largest(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """The serials of the largest two storages that hold them; 0 for what is not followed."""
        found = {
            known.serial: known.size
            for tensor in tensors
            for plain in held_by(tensor)
            if (known := self._known.get(plain.untyped_storage()._cdata)) is not None
        }
        first, second, *_ = [*sorted(found, key=lambda serial: -found[serial]), 0, 0]
        return first, second

    def _type_of(self, tensor: Tensor) -> int:
        return type_of(tensor) if self._types else UNKNOWN_TYPE

    def _is_omitted(self, tensor: Tensor) -> bool:
        """Asks the tensor: a storage that Python has once looked at is an object for as long as it lives."""
        if len(self._known) < MOST_LIVE or tensor.nbytes >= SMALL:
            return False
        self.omitted += 1
        return True

    def _made_by(self, serial: int, now: int) -> bytes:
        return pack(serial, self.line, now, 0, LINE, 0, 0, 0) if self.line else b""

    def settle(self) -> None:
        """Write the allocation that waited for its predecessor to be freed: something else happened first."""
        with suppress(IndexError):
            waiting = self._waiting.pop()
            self._log.append(waiting.event + waiting.passing)

    def _hold(
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
        known = TrackedStorage(storage, self._gone)
        self._serial = serial = self._serial + 1
        known.pointer = pointer = storage._cdata
        known.serial, known.size, known.category = serial, size, category
        known.type = kind
        known.cast_first = known.cast_last = known.casts = known.used = known.asked = 0
        known.wide_inside = known.outside = known.slope = False
        self._known[pointer] = known
        self.settle()
        now = self._log.now()
        event = pack(serial, size, now, layer, ALLOC, phase, category, thread)
        if category == UNDECIDED:
            event += self._made_by(serial, now)
        if instead is None:
            self._log.append(event)
        else:
            self._waiting.append(_Waiting(known, instead, event))
        return True

    def _finalizer(self) -> Callable[[TrackedStorage], None]:
        """What runs when a storage goes, maybe in the middle of our own code: one append and no lock."""
        append, now, storages, waiting = self._log.append, self._log.now, self._known, self._waiting

        def gone(known: TrackedStorage) -> None:
            if known.serial >= 0:
                if waiting:
                    successor = waiting.pop()
                    if successor.instead is known:
                        successor.take_over()
                        storages.pop(known.pointer, None)
                        append(successor.passing)
                        return
                    append(successor.event + successor.passing)
                if storages.get(known.pointer) is known:
                    del storages[known.pointer]
                append(known.last_word(FREE, now()))

        return gone


def _has_bytes(storage: Any) -> bool:
    """Whether a storage holds what its size says: that of zeros for automatic differentiation does not."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:
        return False  # torch says so of one that has a size and no memory


def _stays(known: int, said: int) -> bool:
    return known in (PARAMETER, BUFFER) or (known == INPUT and said == GRADIENT)
