"""Inputs of a step that has just ended, and of a step that failed, among the program's variables.

The search runs no code of the program. It calls only C-level functions of Python's own types. It switches off
overrides of ``__torch_function__``, and reads only plain tensors.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator
from inspect import CO_OPTIMIZED
from itertools import islice
from math import prod
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from memlog._internal.inert_access import (
    bases,
    class_namespace,
    instance_dict,
    is_kind,
    local_variables,
)
from memlog.events import TensorInput

_FRAMES = 64
"""Maximum number of frames to look at."""
_MOST = 300
"""Maximum number of variables to read in a frame."""
_INPUTS = 12
"""Maximum number of inputs to return. Further inputs are left out."""
_MODULE_CALL = "_call_impl"
"""Function of ``torch.nn.Module`` that runs a module's ``forward``."""
_MEMLOG = str(Path(__file__).parents[1]) + "/"


def inputs_at_step_end() -> tuple[tuple[TensorInput, ...], list[Any]]:
    """Return the tensors among the variables of the functions that called the optimizer's step.

    The first part of the result describes them, the second part has the tensors themselves. The variables of
    the innermost function come first. Tensors that require gradients, such as parameters, do not count as
    inputs.
    """
    if "torch" not in sys.modules:
        return (), []
    finder = TensorFinder()
    for frame in program_frames(_outwards(sys._getframe(1))):  # noqa: SLF001 - inspect's is the same
        finder.add(variables_of(frame))
    return tuple(finder.found[:_INPUTS]), finder.tensors[:_INPUTS]


def inputs_of_failure(frames: Iterable[FrameType]) -> tuple[TensorInput, ...]:
    """Return the inputs of a step that failed. ``frames`` is the failure's call stack, outermost frame first.

    The first inputs are tensors in variables of the program's functions, outside the model. The model's
    arguments follow. Each tensor is returned only once.

    If torch's code did not run when the step failed, the step had possibly not got its inputs yet, and the
    variables can be those of the step before. The result is empty then.
    """
    frames = list(frames)
    if not any(map(_is_of_a_step, frames)):
        return ()
    outside: list[FrameType] = []
    inside: list[FrameType] = []
    for frame in frames:
        if inside or frame.f_code.co_name == _MODULE_CALL:
            inside.append(frame)
        else:
            outside.append(frame)
    finder = TensorFinder()
    for frame in program_frames(reversed(outside)):
        finder.add(variables_of(frame))
    if inside:
        finder.add(_arguments(inside))
    return tuple(finder.found[:_INPUTS])


def _is_of_a_step(frame: FrameType) -> bool:
    """Return True if the frame runs torch's code, other than the code that loads data."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    root = str(Path(torch.__file__).parent) + "/"
    file = frame.f_code.co_filename
    return file.startswith(root) and not file.startswith(f"{root}utils/data/")


def _arguments(frames: list[FrameType]) -> list[tuple[str, object]]:
    """Return the arguments of the outermost module call, named as in its ``forward``."""
    held = local_variables(frames[0])
    positional, by_name = held.get("args"), held.get("kwargs")
    names: tuple[str, ...] = ()
    # If hooks for all modules are registered, torch calls `forward` through one more function.
    codes = [frame.f_code for frame in frames[1:3] if frame.f_code.co_name == "forward"]
    if codes:
        names = codes[0].co_varnames[1 : codes[0].co_argcount]
    found: list[tuple[str, object]] = []
    if type(positional) is tuple:
        named = (*names, *(f"args[{at}]" for at in range(len(names), len(positional))))
        found += zip(named, positional, strict=False)
    if type(by_name) is dict:
        found += by_name.items()
    return found


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """Return the names and values of a frame's variables.

    If the frame runs a Python file's top-level code, return only the variables that this code uses.
    """
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        return list(local_variables(frame).items())[:_MOST]
    namespace = frame.f_locals  # the namespace of a module or class itself, not a copy
    if type(namespace) is not dict:
        return []
    return [(name, namespace[name]) for name in code.co_names[:_MOST] if name in namespace]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def program_frames(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Look at the first `_FRAMES` frames. Yield those that run neither torch's code nor memlog's code."""
    torch: Any = sys.modules.get("torch")
    foreign = (_MEMLOG,) if torch is None else (_MEMLOG, str(Path(torch.__file__).parent) + "/")
    for frame in islice(frames, _FRAMES):
        if not frame.f_code.co_filename.startswith(foreign):
            yield frame


_DEPTH = 3
"""Maximum depth of containers in containers. Deeper values are not looked at."""
_ITEMS = 16
"""Containers with more items than this are not searched: they are data sets or histories, not batches."""
_VALUES = 2_000
"""Maximum number of values to look at in one search."""
_FOUND = 32
"""Maximum number of tensors to find in one search."""
_NAME = 60
"""Maximum number of characters in a tensor's name. Tensors with longer names are left out."""
_WITHOUT_TENSORS = frozenset(
    id(kind)
    for kind in (
        *(int, float, bool, str, bytes, complex, range, type(None), type, set, frozenset),
        *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    )
)
"""Identities of types whose instances contain no tensors. The types themselves are not compared, because a
metaclass can define ``__eq__`` and ``__hash__``."""


class TensorFinder:
    """Finder of the plain tensors among some variables.

    Make a new finder for each search. A finder recognises objects by their ids, so the caller must keep the
    objects alive until the search has ended.
    """

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._seen: set[int] = set()
        self._looked_at = 0
        self.found: list[TensorInput] = []
        self.tensors: list[Any] = []
        """The tensors of `found`."""

    def add(self, variables: Iterable[tuple[str, object]]) -> None:
        """Add the tensors of some variables. A tensor with several names is added under the first name."""
        if self._torch is None:
            return
        with self._torch._C.DisableTorchFunction():  # noqa: SLF001 - no public name
            for name, value in variables:
                self._add(name, value, _DEPTH)

    def _add(self, name: str, value: object, depth: int) -> None:
        kind = type(value)
        if id(kind) in _WITHOUT_TENSORS or self._is_full():
            return
        if kind is self._torch.Tensor:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._add_tensor(name, value)
        elif depth:
            for item, inner in _items(name, value):
                self._add(item, inner, depth - 1)

    def _is_full(self) -> bool:
        self._looked_at += 1
        return self._looked_at > _VALUES or len(self.found) >= _FOUND

    def _add_tensor(self, name: str, tensor: Any) -> None:
        if tensor.requires_grad or tensor.is_nested or not tensor.dim() or len(name) > _NAME:
            return
        shape = tuple(int(size) for size in tensor.shape)
        self.found.append(TensorInput(name, shape, str(tensor.dtype).removeprefix("torch.")))
        self.tensors.append(tensor)


def _items(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the items of a container with their names; nothing if ``value`` is no container, or too large."""
    if is_kind(value, dict):
        yield from _dict_items(name, cast("dict[object, object]", value))
    elif is_kind(value, list):
        yield from _sequence_items(name, list.__iter__(cast("list[object]", value)))
    elif is_kind(value, tuple):
        yield from _sequence_items(name, tuple.__iter__(cast("tuple[object, ...]", value)))
    elif is_kind(value, UserDict):  # such as ``BatchEncoding`` of Hugging Face
        inner = dict(_attributes(value)).get("data")
        if type(inner) is dict:
            yield from _dict_items(name, inner)
    elif any("__dataclass_fields__" in class_namespace(one) for one in bases(type(value))):
        yield from ((f"{name}.{field}", each) for field, each in _attributes(value))


def _dict_items(name: str, values: dict[object, object]) -> Iterator[tuple[str, object]]:
    if dict.__len__(values) > _ITEMS:
        return
    for key, value in list(dict.items(values)):
        if type(key) is str and key.isprintable():
            yield f'{name}["{key}"]', value
        elif type(key) is int:
            yield f"{name}[{key}]", value


def _sequence_items(name: str, values: Iterator[object]) -> Iterator[tuple[str, object]]:
    items = list(islice(values, _ITEMS + 1))
    if len(items) <= _ITEMS:
        yield from ((f"{name}[{at}]", item) for at, item in enumerate(items))


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return an instance's own attributes without calling properties or ``__getattribute__``."""
    own = instance_dict(value)
    if own is None or len(own) > _ITEMS:
        return []
    return [(name, each) for name, each in list(own.items()) if type(name) is str]


_LOOKS = 2
"""If something grew at this number of looks in a row, it keeps what earlier steps made."""
_OWN = 0.4
"""If a variable's tensor grows at each look, and this part of the peaks' rise is its own bytes, it is kept.
``torch.cat`` has the old tensor beside the new one, so a half of the rise is the new one's. A model needs
several times the memory of its inputs."""


class KeptTensors:
    """Watch over the tensors that are seen at the ends of steps."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._gains: Counter[str] = Counter()
        self._grown: dict[str, _Growth] = {}

    def inputs_among(self, found: tuple[TensorInput, ...], peak: int) -> tuple[TensorInput, ...]:
        """Return the tensors that are inputs of this step. ``peak`` is the step's peak in bytes.

        The items of a container that gains items from look to look are left out, and so is a variable's
        tensor whose own growth explains the peaks.
        """
        held = Counter(container for each in found if (container := _container(each)))
        for name, count in held.items():
            if count > self._held.get(name, count):
                self._gains[name] += 1
            elif self._gains[name] < _LOOKS:
                self._gains[name] = 0
        self._held = held
        return tuple(
            each
            for each in found
            if not self._gains[_container(each)] and not self._explains_peaks(each, peak)
        )

    def _explains_peaks(self, each: TensorInput, peak: int) -> bool:
        size = _bytes(each)
        growth = self._grown.get(each.name)
        if growth is None or size < growth.size:
            self._grown[each.name] = _Growth(size, peak)
            return False
        growth.looks += size > growth.size
        growth.size = size
        return growth.looks >= _LOOKS and size - growth.first > _OWN * (peak - growth.peak)


class _Growth:
    """Sizes of a variable's tensor since it shrank last."""

    def __init__(self, size: int, peak: int) -> None:
        self.first = self.size = size
        self.peak = peak
        self.looks = 0


def _container(each: TensorInput) -> str:
    """Return the variable that holds an input as an item; empty if the input is a variable itself."""
    name, bracket, _ = each.name.partition("[")
    return name if bracket else ""


def _bytes(each: TensorInput) -> int:
    bits = re.search(r"\d+", each.dtype)  # none in ``bool``
    return prod(each.shape) * (1 if bits is None else int(bits[0]) // 8)
