"""Devices on which the tensors of a training on a CUDA device lie, with the CPU in the devices' place.

An estimate traces operations on the CPU, even if the program names a CUDA device.

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

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from memlog.estimates.cpu_workspaces import extent
from memlog.torchside.fakes import FakeTensor, OpOverload, parse_to
from memlog.torchside.internals import ENGINE
from memlog.tracer.tensor_storages import PLAIN_CLASSES, plain_tensors, tensors_in

_MOVES: Final = frozenset((Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.pin_memory))
_READ_NAMES: Final = (torch.device, parse_to)
"""Functions that return the device that a program names."""
_PROPERTIES: Final = (
    "dtype grad is_cpu is_leaf is_nested is_sparse itemsize layout nbytes ndim requires_grad shape "
    "_version"
)
_METHODS: Final = (
    "dim element_size is_complex is_contiguous is_floating_point is_inference numel size storage_offset "
    "stride untyped_storage _is_view"
)
_READS: Final = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
    )
)
"""Functions that run no operation and name no device."""
_HERE: Final = str(Path(__file__).parent)
_OPTIMIZERS: Final = str(Path(torch.optim.__file__).parent)
_CPU: Final = torch.device("cpu")
_CUDA: Final = torch.device("cuda", 0)


@contextmanager
def all_on_cpu(places: Places | None = None) -> Iterator[None]:
    """Make every tensor on the CPU inside the block, even if the program names a CUDA device.

    ``places``: Gets the devices that the program names; ``None``: nobody asks for them.
    """
    default = torch.get_default_device()
    with ExitStack() as undo:
        undo.enter_context(nullcontext() if default.type == "cpu" else torch.device("cpu"))
        if places is None:
            undo.enter_context(_OnCpu())
        else:
            if default.type == "cuda":
                places.default = DEVICE
                places.cuda_named()
            undo.enter_context(patch.object(FakeTensor, "device", _device_seen(places)))
            undo.enter_context(patch.object(save_on_cpu, "__init__", _saving(places)))
            placing = undo.enter_context(_Placing(places))
            engine = placing.of_program(getattr(torch.autograd, ENGINE))
            undo.enter_context(patch.object(torch.autograd, ENGINE, engine))
            undo.enter_context(patch.object(saved_tensors_hooks, "__init__", _packing(placing)))
        undo.enter_context(patch.object(nn.Module, "_apply", _convert))
        undo.enter_context(patch.object(torch.cuda, "synchronize", lambda *_: None))
        yield


class _OnCpu(TorchFunctionMode):
    """Mode that replaces CUDA devices by the CPU among the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return func(*args)  # most calls only read a property of a tensor, such as its shape
        given, named = _named_cpu(func, args, kwargs or {})
        if func is torch.device and (given, named) != (list(args), kwargs or {}):
            return torch.device("cpu")
        return func(*given, **named)


class _Placing(TorchFunctionMode):
    """Mode like `_OnCpu`, which also notes the devices that the program names."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An operation is no call of the program's.
        is_read = func in _READS and type(args[0]) not in PLAIN_CLASSES
        if is_read or func in _READ_NAMES or isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        if func is Tensor.get_device:
            return 0 if self._places.of(args[0]) == DEVICE else -1
        if func in _MOVES:
            return self._move(func, args, kwargs or {})
        kwargs = kwargs or {}
        given, named = _named_cpu(func, args, kwargs)
        asked = None
        if kwargs.get("device") is not None:
            asked = self._place_of(kwargs["device"])
        # Pinned memory is on the host.
        if named.pop("pin_memory", False):
            asked = ON_HOST
        with self._places.asking(asked), self._places.beside(tensors_in((given, named))):
            return func(*given, **named)

    def of_program(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs in this mode, because code of the program runs inside.

        torch removes a mode while the mode handles a function, such as ``backward``, which calls hooks.
        """

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self, self._places.outside():
                return function(*args, **kwargs)

        return inside

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        places, (tensor, *rest) = self._places, args
        target = self._target(func, rest, kwargs)
        source = places.of(tensor)
        # The CPU's name alone can mean any place, but a move from the device to the CPU ends on the host.
        if target is not None and source == DEVICE and target == UNNAMED:
            target = ON_HOST
        given, named = _named_cpu(func, args, kwargs)
        if target is None or not places.differ(source, target):
            with places.asking(None):
                return func(*given, **named) if func is Tensor.to else tensor
        # `Tensor.cuda` and `Tensor.cpu` have other arguments than `Tensor.to`.
        if func is not Tensor.to:
            given, named = [tensor], {}
        if target == ON_HOST:
            given[0] = packed(tensor)
        if func is Tensor.cuda:
            places.cuda_named()
        # Here both places are the CPU. Without `copy`, `Tensor.to` would return the tensor itself.
        with places.asking(target):
            moved = Tensor.to(*given, **{**named, "copy": True})
        # In a backward pass, the gradient moves back to the tensor's place.
        if moved.requires_grad:
            moved.register_hook(lambda gradient: places.moved(gradient, source))
        return moved

    def _target(self, func: Any, rest: Any, kwargs: Any) -> int | None:
        """Return the place to which a call moves its tensor; ``None`` if the call names none."""
        if func is Tensor.cuda:
            return DEVICE
        if func in (Tensor.cpu, Tensor.pin_memory):
            return ON_HOST
        for value in (*rest[:1], kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, Tensor):
                return self._places.of(value)
            if isinstance(value, (str, torch.device)) or type(value) is int:
                return self._place_of(value)
        return None

    def _place_of(self, device: Any) -> int:
        """Return the place that a device's name or number means, and note that the program names it."""
        if device is _CPU or device is _CUDA:  # the program has asked a tensor for its device
            return DEVICE if device is _CUDA else UNNAMED
        kind = "cuda" if type(device) is int else str(device).partition(":")[0]
        if kind == "cpu":
            # The step counts of torch's optimizers are on the host, whatever the program names.
            return ON_HOST if _asked_by_optimizer() else self._places.cpu_named()
        if kind != "cuda":
            return UNNAMED
        self._places.cuda_named()
        return DEVICE


def _asked_by_optimizer() -> bool:
    """Return whether the newest call outside memlog is in the code of torch's optimizers."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OPTIMIZERS)


def _named_cpu(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments, in which the CPU stands for a CUDA device."""
    given = [_on_cpu(value) for value in args]
    if func is Tensor.to and len(given) > 1 and type(given[1]) is int:
        given[1] = "cpu"  # the integer was the number of a CUDA device
    named = {name: _on_cpu(value) for name, value in kwargs.items()}
    if type(named.get("device")) is int:
        named["device"] = "cpu"
    return given, named


def _on_cpu(value: Any) -> Any:
    is_name = isinstance(value, (str, torch.device))
    return "cpu" if is_name and str(value).partition(":")[0] == "cuda" else value


def _device_seen(places: Places) -> property:
    """Return the property ``device`` of fake tensors: outside torch's functions, the program's device."""
    of_torch: Any = FakeTensor.__dict__["device"]

    def device(tensor: Any) -> torch.device:
        of_fake: torch.device = of_torch.__get__(tensor)
        is_of_program = getattr(tensor.fake_mode, "places", None) is places
        if places.inside or of_fake.type != "cpu" or not is_of_program:
            return of_fake
        return _CUDA if places.of(tensor) == DEVICE else _CPU

    return property(device)


def _saving(places: Places) -> Callable[..., None]:
    def init(self: Any, *_: Any, **__: Any) -> None:
        def pack(tensor: Tensor) -> tuple[int | None, Tensor]:
            source = places.of(tensor)
            kept = places.moved(tensor, ON_HOST)
            return (None if kept is tensor else source), kept

        def unpack(saved: tuple[int | None, Tensor]) -> Tensor:
            source, kept = saved
            return kept if source is None else places.copy(kept, source)

        super(save_on_cpu, self).__init__(pack, unpack)

    return init


def _packing(placing: _Placing) -> Callable[..., None]:
    original: Any = saved_tensors_hooks.__init__

    def init(self: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        original(self, placing.of_program(pack), placing.of_program(unpack))

    return init


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Apply ``fn`` to a module's tensors. This replaces ``Module._apply``, which refuses fake parameters."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = fn(parameter.data)
            if parameter.grad is not None:
                parameter.grad = fn(parameter.grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


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
        kinds = [self._place(plain).kind for plain in self._plain(tensor)]
        return kinds[0] if kinds else UNNAMED

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
        if all(self.of(tensor) == UNNAMED for tensor in self._model):
            for tensor in self._model:
                self.put(tensor, DEVICE)

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
        if any(self.of(tensor) == DEVICE for tensor in tensors):
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
        # `copy_` writes into a tensor, which stays where it is.
        if func is _COPY:
            self._operation = self._place(args[0])
            return
        if name.startswith("aten::_foreach_") and isinstance(out, (list, tuple)):
            # Each result of a list lies where its own arguments lie.
            lists = [argument for argument in args if isinstance(argument, (list, tuple))]
            for result, *given in zip(out, *lists, strict=False):
                self._note(given, result)
            return
        self._note(args[:1] if name.partition(".")[0] in _INDEXING else (args, kwargs), out)

    def _note(self, values: Any, out: Any) -> None:
        given = [plain for argument in tensors_in(values) for plain in self._plain(argument)]
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
        places = [self._place(tensor) for tensor in given if tensor.ndim] or list(
            map(self._place, given)
        )
        if not places:
            return self.default
        kinds = {place.kind for place in places}
        if not self.names_cuda and kinds == {UNNAMED, ON_HOST}:
            # Such as ``pack_padded_sequence(x, lengths.cpu())``: x is not on the host.
            return UNNAMED
        # `ON_HOST` has a higher number than `UNNAMED`, so a known place decides.
        kind = DEVICE if DEVICE in kinds else max(kinds)
        for place in places:
            if place.kind == UNNAMED:
                place.kind = kind
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
