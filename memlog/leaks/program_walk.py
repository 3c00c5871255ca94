"""Lengths of the program's own containers, from a walk that begins at its variables.

The walk begins at the variables of running functions, of the program's modules and of its suspended
generators, and goes through instances, containers, closures and default arguments. So it visits few objects
of libraries, and finds dictionaries that hold only numbers and strings.

The walk goes on in slices. Between two slices it keeps numbers and names, and no object of the program.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

import torch

from memlog._internal.inert_access import (
    bases,
    class_namespace,
    container_kind,
    instance_dict,
    is_kind,
    module_file,
    module_namespace,
)
from memlog.leaks.containers import filled, told_bytes
from memlog.leaks.live_tensors import tensor_storage
from memlog.leaks.owner_chain import (
    NamePath,
    Start,
    find_suspended,
    identity_of,
    path_to,
    running_frames,
    suspended,
    variables_of,
)
from memlog.leaks.owner_text import PYPLOT_FIGURES
from memlog.leaks.process_objects import is_memlog_module
from memlog.torchside.tensors import DisableTorchFunctionSubclass
from memlog.tracer.module_stack import CallingLines

_SLICE: Final = 0.003
"""Processor seconds after which a slice ends, when the walk from a variable has ended."""
_LONGEST: Final = 0.05
"""Maximum processor seconds of the walk from one variable. Objects that are farther away are not visited."""
_MAX_VISITED: Final = 400_000
"""Maximum number of visited objects of a walk."""
_MAX_LENGTHS: Final = 200_000
_MAX_DEPTH: Final = 12
_ENDS: Final = 128
"""Number of elements at each end of a container that are visited."""
_CHECKED: Final = 64
"""Number of objects between two looks at the clock."""
_ATOMS: Final = (
    int, float, complex, str, bytes, type(None), torch.dtype, torch.device, CodeType, ModuleType, FrameType,
    BuiltinFunctionType, MappingProxyType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType,
    WrapperDescriptorType,
)  # fmt: skip
"""Types of objects that hold no container of the program."""
_DEPTH: Final = 3
"""Depth of a data frame's arrays: its manager refers to a tuple of blocks, and each block to its array."""
_ALWAYS: Final = ("__main__", PYPLOT_FIGURES)
"""Modules whose variables are read although their files may be no program's."""
_BUFFERS: Final = "buffer"
_OTHERS: Final = "other"

Lengths = dict[object, int]
"""Length of each container by its identity, and by its slot: the owner's identity, the place, and the kind.

The slot finds a container that the program replaces. Tensors and arrays, in bytes, are found by it alone.
"""
_Link = tuple[Any, Any]


class Grown(NamedTuple):
    """A container that is longer than in an earlier walk, or a tensor or an array that is larger."""

    path: NamePath
    before: int
    now: int
    is_replaced: bool
    """True if it is another object than before, in the same place."""


class ProgramWalk:
    """One walk. Without ``before``, record `lengths`; with it, compare, and record what has `grown`.

    Containers that are new since ``before`` are added to it, for the next walk.

    ``lines`` tells which source files are the program's. It remembers them for later walks.

    Attributes:
        lengths: Lengths of the containers, as the first walk that met each one has found them.
        grown: Containers that are longer than in ``before``.
    """

    def __init__(self, lines: CallingLines, before: Lengths | None = None) -> None:
        self._compares = before is not None
        self.lengths: Lengths = {} if before is None else before
        self.grown: list[Grown] = []
        self._seen: set[int] = set()
        self._kinds: dict[int, tuple[type, object]] = {}
        self._lines = lines
        self._visited = 0
        self._began = 0.0
        self._slices = self._walk()

    def go_on(self) -> bool:
        """Do the next slice of the walk. Return True if the walk has ended."""
        self._began = time.thread_time()
        # `self` is returned only at the end: between slices, the generator yields `None`.
        return next(self._slices, self) is self

    def _walk(self) -> Iterator[None]:
        for read in self._scopes():
            variables = read()
            for start in sorted(
                variables, key=lambda variable: type(variables[variable]) is FunctionType
            ):
                if time.thread_time() > self._began + _SLICE:
                    variables = {}  # nothing of the program is kept between slices
                    yield
                    variables = read()
                if self._visited < _MAX_VISITED:
                    self._visit(start, variables.get(start))
            variables = {}

    def _scopes(self) -> Iterator[Callable[[], dict[Start, Any]]]:
        """Yield functions that read variables: of the program first, because its names are preferred."""
        codes = dict.fromkeys(identity_of(frame.f_code) for frame in running_frames())
        own = [code for code in codes if self._lines.is_program(code[1])]
        for code in own:
            yield lambda code=code: _locals(code)  # type: ignore[misc] # the default binds the loop's value
        for name in list(sys.modules):
            if type(name) is str and (name in _ALWAYS or self._is_program_module(name)):
                yield lambda name=name: _globals(name)  # type: ignore[misc] # likewise
        if not self._compares:
            find_suspended(self._lines.is_program)
        for code in suspended():
            yield lambda code=code: _locals(code)  # type: ignore[misc] # likewise
        for code in codes.keys() - set(own):
            yield lambda code=code: _locals(code)  # type: ignore[misc] # likewise

    def _is_program_module(self, name: object) -> bool:
        # An integration that is installed from its sources is in no folder of packages.
        file = "" if is_memlog_module(name) else module_file(name)
        return bool(file) and self._lines.is_program(file)

    def _visit(self, start: Start, value: Any) -> None:
        """Visit the objects to which a variable leads, the nearest first."""
        late = time.thread_time() + _LONGEST
        first = self._take(value, start, None, start)
        waiting: deque[tuple[_Link, int]] = deque([((value, None), 0)] if first else [])
        checked = 0
        while waiting:
            link, depth = waiting.popleft()
            for place, child in enumerate(self._children(link[0])):
                checked += 1
                if checked % _CHECKED == 0 and time.thread_time() > late:
                    return
                if self._take(child, (id(link[0]), place), link, start) and depth < _MAX_DEPTH:
                    waiting.append(((child, link), depth + 1))

    def _take(self, one: Any, slot: object, above: _Link | None, start: Start) -> bool:
        """Record an object's length. Return True if the objects to which it refers are visited, too."""
        kind = self._kind_of(type(one))
        if kind is None or id(one) in self._seen:
            return False
        if is_kind(one, type):
            module = class_namespace(one).get("__module__")
            if module != PYPLOT_FIGURES and not self._is_program_module(module):
                return False
        self._seen.add(id(one))
        self._visited += 1
        if kind is _OTHERS:
            return True
        is_buffer = kind is _BUFFERS
        length = buffer_bytes(one) if is_buffer else filled(one, kind)  # type: ignore[arg-type]
        slot = slot, id(kind)
        keys = (slot,) if is_buffer else (id(one), slot)
        known = next((key for key in keys if key in self.lengths), None)
        if known is None or not self._compares:
            if len(self.lengths) < _MAX_LENGTHS:
                self.lengths.update(dict.fromkeys(keys, length))
        elif length > (before := self.lengths[known]) and not _is_left_out(one, above):
            path = path_to(start, _objects((one, above)))
            if path is not None:
                # A container that is known only by its slot is another object than before.
                self.grown.append(Grown(path, before, length, known is not keys[0] or is_buffer))
        return not is_buffer

    def _kind_of(self, kind: type) -> object:
        """Return `_BUFFERS`, `_OTHERS`, or the type from `CONTAINERS`; ``None``: holds no container."""
        known = self._kinds.get(id(kind))
        if known is None:
            known = self._kinds[id(kind)] = kind, _kind_of(kind)
        return known[1]

    def _children(self, one: Any) -> list[Any]:
        base = container_kind(type(one))
        if base is not None or is_kind(one, tuple):
            return _ends(one, base or tuple)
        if type(one) is FunctionType:
            # `cell_contents` raises a `ValueError` for an empty cell.
            cells = [value for cell in one.__closure__ or () for value in gc.get_referents(cell)]
            # Such as its attributes and keyword defaults. Globals are visited as those of a module.
            own = [referent for referent in gc.get_referents(one) if type(referent) is dict]
            own = [
                referent
                for referent in own
                if referent is not one.__globals__ and "__builtins__" not in referent
            ]
            return [*cells, *(one.__defaults__ or ()), *own]
        if is_kind(one, type):
            return list(class_namespace(one).values())
        return gc.get_referents(one)


def buffer_bytes(one: Any) -> int:
    """Return the bytes of a tensor's storage, of an array, or of a data frame's arrays; 0 if unknown."""
    if is_kind(one, torch.Tensor):
        try:
            with DisableTorchFunctionSubclass():
                storage = tensor_storage(one)
                return 0 if storage is None else int(storage.nbytes())
        except RuntimeError:  # the size can be symbolic
            return 0
    if is_kind(one, bytearray):
        return bytearray.__len__(one)
    if any(is_kind(one, kind) for kind in _arrow_types()):
        return told_bytes(one)
    array = _array_type()
    if array is None:
        return 0
    return int(array.nbytes.__get__(one)) if is_kind(one, array) else _frame_bytes(one, array)


def _frame_bytes(frame: Any, array: Any) -> int:
    """Return the bytes of the arrays in a pandas data frame, without a call of its methods."""
    size, waiting = 0, [(instance_dict(frame) or {}).get("_mgr")]
    for _ in range(_DEPTH):
        inner = [referent for value in waiting for referent in gc.get_referents(value)]
        size += sum(int(array.nbytes.__get__(value)) for value in inner if is_kind(value, array))
        waiting = [value for value in inner if is_kind(value, tuple) or _is_of_pandas(type(value))]
    return size


def _is_of_pandas(kind: type) -> bool:
    module = class_namespace(kind).get("__module__")
    return type(module) is str and module.startswith("pandas.")


def is_state_of(optimizer: Any, one: Any) -> bool:
    """Return True if ``one`` is the dictionary in which an optimizer has its state of each parameter."""
    is_optimizer = is_kind(optimizer, torch.optim.Optimizer)
    return is_optimizer and (instance_dict(optimizer) or {}).get("state") is one


def is_buffer(kind: type) -> bool:
    """Return True for tensors, arrays, data frames, Arrow's tables and arrays, and bytearrays."""
    known = (torch.Tensor, bytearray, _array_type(), _frame_type(), *_arrow_types())
    return any(base is buffer for base in bases(kind) for buffer in known if buffer is not None)


def _array_type() -> Any:
    return getattr(sys.modules.get("numpy"), "ndarray", None)


def _frame_type() -> Any:
    return getattr(sys.modules.get("pandas"), "DataFrame", None)


def _arrow_types() -> tuple[Any, ...]:
    arrow = sys.modules.get("pyarrow.lib")
    names = ("Table", "RecordBatch", "ChunkedArray", "Array")
    kinds = (getattr(arrow, name, None) for name in names)
    return tuple(kind for kind in kinds if kind is not None)


def _kind_of(kind: type) -> object:
    if any(base is atom for base in bases(kind) for atom in _ATOMS):
        return None
    if is_memlog_module(class_namespace(kind).get("__module__")):
        return None
    if is_buffer(kind):
        return _BUFFERS
    return container_kind(kind) or _OTHERS


def _is_left_out(one: Any, above: _Link | None) -> bool:
    """Return True for a dictionary of attributes, and for what an optimizer has except its `state`."""
    link = above
    while link is not None:
        if is_kind(link[0], torch.optim.Optimizer):
            return not is_state_of(link[0], one)
        link = link[1]
    return above is not None and instance_dict(above[0]) is one


def _ends(one: Any, base: type) -> list[Any]:
    """Return the elements at both ends of a container; values of a dictionary."""
    try:
        values: Any = dict.values(one) if base is dict else one
        forward = iter(values) if base is dict else base.__iter__(one)  # type: ignore[attr-defined]
        if base.__len__(one) <= 2 * _ENDS:  # type: ignore[attr-defined]
            return list(forward)
        elements = list(itertools.islice(forward, _ENDS))
        if base is dict:
            elements += itertools.islice(reversed(values), _ENDS)
        elif base is list or base is tuple:
            elements += base.__getitem__(one, slice(-_ENDS, None))
        elif base is deque:
            elements += itertools.islice(deque.__reversed__(one), _ENDS)
    except RuntimeError:  # another thread has changed the container meanwhile
        return []
    return elements


def _objects(link: _Link | None) -> list[Any]:
    objects = []
    while link is not None:
        objects.append(link[0])
        link = link[1]
    return objects[::-1]


def _locals(code: tuple[str, str, int]) -> dict[Start, Any]:
    return {Start(name, "", code): value for name, value in variables_of(code).items()}


def _globals(name: str) -> dict[Start, Any]:
    items = list(module_namespace(name).items())
    return {Start(key, name): value for key, value in items if type(key) is str}
