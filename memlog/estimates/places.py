"""Devices on which the tensors of a training on a CUDA device lie.

All fake tensors of an estimate are on the CPU. `Places` follows where the real tensors would be: on the
device, or on the host. A tensor's place is that of its storage:

* A call that names a device (``device="cuda"``, ``.to("cuda")``, ``.cpu()``) decides.
* The result of an operation lies where the operation's tensors lie.
* A tensor whose place no call names lies where the tensors lie with which an operation uses it.
* The others are on the host if the program names a CUDA device anywhere, because torch makes tensors on the
  CPU by default. A program that names none is estimated as if it ran on the device as a whole.
* Without CUDA, a program that asks ``torch.cuda.is_available()`` names the CPU where it would name a CUDA
  device. So the CPU's name means the device until the program names a CUDA device itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memlog.estimates.real_tensors import extent
from memlog.tracer.tensor_storages import plain_tensors, tensors_in

UNNAMED: Final = 0
DEVICE: Final = 1
ON_HOST: Final = 2

_aten: Final = torch.ops.aten
_COPY: Final = _aten.copy_.default
_INDEXING: Final = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_")
)
"""Operations whose indices may be on the host, even if the tensor itself is on a device."""


class Place:
    """Place of one storage: `UNNAMED`, `DEVICE` or `ON_HOST`."""

    __slots__ = ("kind",)

    def __init__(self, kind: int) -> None:
        self.kind = kind


class Places:
    """Places of all storages of fake tensors.

    Attributes:
        names_cuda: True if the program has named a CUDA device.
        default: Place of new tensors for which the program names no device.
        inside: Number of torch's functions that run. Inside, each fake tensor is on the CPU.
        stand_in: Function that returns the fake tensor that stands for a real tensor.
        stream: Number of the stream for which memory is allocated now; 0: the device's usual one.
    """

    def __init__(self) -> None:
        self.names_cuda = False
        self.default = UNNAMED
        self.inside = self.stream = 0
        self.stand_in: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self._asked: int | None = None
        self._cpu_is_device = False
        """True if the CPU's name means the device."""
        self._of: dict[int, Place] = {}
        self._operation = Place(UNNAMED)
        self._model: Sequence[Tensor] = ()

    def of(self, tensor: Tensor) -> int:
        """Return the place of a tensor."""
        found = [self._place(plain).kind for plain in self._plain(tensor)]
        return found[0] if found else UNNAMED

    def put(self, tensor: Tensor, kind: int) -> None:
        """Set the place of a tensor's storage."""
        for plain in self._plain(tensor):
            self._place(plain).kind = kind

    def cuda_named(self) -> None:
        """Note that the program names a CUDA device."""
        self._cpu_is_device = False
        if not self.names_cuda:
            self.names_cuda = True
            self._put_model()

    def cpu_named(self) -> int:
        """Return the place that the CPU's name means in the program."""
        if not self.names_cuda and not torch.cuda.is_available():
            self.cuda_named()
            self._cpu_is_device = True
        return DEVICE if self._cpu_is_device else UNNAMED

    def train(self, tensors: Iterable[Tensor]) -> None:
        """Note the model's tensors. If the program moves none of them, the whole model is on the device."""
        self._model = list(tensors)
        if self.names_cuda:
            self._put_model()

    def _put_model(self) -> None:
        if all(self.of(each) == UNNAMED for each in self._model):
            for each in self._model:
                self.put(each, DEVICE)

    @contextmanager
    def asking(self, kind: int | None) -> Iterator[None]:
        """Put the results of operations inside the block to a place that a call names; ``None``: none."""
        before = self._asked
        self._asked = before if kind is None else kind
        self.inside += 1
        try:
            yield
        finally:
            self._asked = before
            self.inside -= 1

    @contextmanager
    def beside(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Put tensors that a function makes from nothing on the device, if one of its arguments is there."""
        before = self.default
        if any(self.of(each) == DEVICE for each in tensors):
            self.default = DEVICE
        try:
            yield
        finally:
            self.default = before

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Run code of the program inside a function of torch, such as hooks of a backward pass."""
        before = self.inside, self._asked
        self.inside, self._asked = 0, None
        try:
            yield
        finally:
            self.inside, self._asked = before

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the places of an operation's results."""
        name = func.name()
        if func is _COPY:
            self._operation = self._place(args[0])
            return
        if name.startswith("aten::_foreach_") and isinstance(out, (list, tuple)):
            lists = [each for each in args if isinstance(each, (list, tuple))]
            for result, *given in zip(out, *lists, strict=False):
                self._note(given, result)
            return
        self._note(args[:1] if name.partition(".")[0] in _INDEXING else (args, kwargs), out)

    def _note(self, values: Any, out: Any) -> None:
        given = [plain for each in tensors_in(values) for plain in self._plain(each)]
        kind = self._common(given) if self._asked is None else self._asked
        known = {plain.untyped_storage()._cdata for plain in given}
        self._operation = Place(kind)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()._cdata
                if storage not in known:
                    self._of[storage] = Place(kind)

    def _common(self, given: Iterable[Tensor]) -> int:
        """Return the place of an operation's tensors. Single numbers may be elsewhere."""
        given = list(given)
        places = [self._place(each) for each in given if each.ndim] or list(map(self._place, given))
        if not places:
            return self.default
        kinds = {each.kind for each in places}
        if not self.names_cuda and kinds == {UNNAMED, ON_HOST}:
            # Such as ``pack_padded_sequence(x, lengths.cpu())``: x is not on the host.
            return UNNAMED
        kind = DEVICE if DEVICE in kinds else max(kinds)
        for each in places:
            if each.kind == UNNAMED:
                each.kind = kind
        return kind

    def _place(self, plain: Tensor) -> Place:
        storage = plain.untyped_storage()._cdata
        if storage not in self._of:
            self._of[storage] = Place(UNNAMED)
        return self._of[storage]

    def _plain(self, tensor: Tensor) -> Iterator[Tensor]:
        return plain_tensors(tensor if isinstance(tensor, FakeTensor) else self.stand_in(tensor))

    def differ(self, source: int, target: int) -> bool:
        """Return whether a tensor must be copied to come from one place to another."""
        if DEVICE in (source, target):
            return source != target
        # ``.cpu()`` in a program that names no device is there for tensors on the device.
        return source == UNNAMED and target == ON_HOST and not self.names_cuda

    def moved(self, tensor: Tensor, kind: int) -> Tensor:
        """Return a tensor at a place: a copy, or the tensor itself if it is there."""
        if not self.differ(self.of(tensor), kind):
            return tensor
        return self.copy(tensor, kind)

    def copy(self, tensor: Tensor, kind: int) -> Tensor:
        """Return a copy of a tensor at a place."""
        if kind == ON_HOST:
            tensor = packed(tensor)
        with self.asking(kind):
            return tensor.clone()

    def of_storage(self, storage: Any) -> Place | None:
        """Return the place of a storage; ``None``: on the device."""
        return self._of.get(storage._cdata)

    def of_operation(self) -> Place | None:
        """Return the place of the newest operation, where its buffers lie, too; ``None``: on the device.

        An operation whose tensors have no known place is part of another one, such as a backward pass.
        """
        return None if self._operation.kind == UNNAMED else self._operation

    def is_elsewhere(self, place: Place | None) -> bool:
        """Return whether a place is the host."""
        if place is None or place.kind == DEVICE:
            return False
        return place.kind == ON_HOST or self.names_cuda


def packed(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps between its values, or a copy without gaps.

    torch makes such a copy on the device before it copies to the host.
    """
    whole = extent(tensor.shape, tensor.stride()) == tensor.numel()
    return tensor if whole else tensor.contiguous()
