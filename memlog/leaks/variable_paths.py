"""Paths of names from a variable to an object, such as ``trainer``, ``.metric``, ``['preds']``.

A path is kept from step to step instead of the object, so that nothing of the program is kept alive. It is
followed again when the object is needed.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
)
from typing import Any, Final, NamedTuple, TypeAlias

from memlog._internal.frame_locals import LIVE_LOCALS, local_variables
from memlog._internal.inert_access import (
    bases,
    class_namespace,
    container_base,
    instance_dict,
    is_kind,
    module_namespace,
)
from memlog._internal.tracked_objects import tracked_objects
from memlog.leaks.frame_variables import is_memlog
from memlog.leaks.owner_chain import Chain, Root

_KEYS: Final = (str, int, float, bool, bytes, type(None))
_MAX_NAMES: Final = 100_000
"""Maximum number of names of one object. In an object with more, its elements get no path."""
_AHEAD: Final = 2
"""An instance's dictionary can lie between the instance and the value of an attribute."""

Hop: TypeAlias = tuple[str, Any]
"""Kind of a name (``item``, ``attr``, ``cell``, ``default``, ``local`` or ``ref``), and the name."""


class Start(NamedTuple):
    """Variable at which a path starts. ``code`` is ``None`` for a variable of the module ``place``.

    Otherwise it is the name, file and first line of the function that has the variable.
    """

    name: str
    place: str
    code: tuple[str, str, int] | None = None


class Path(NamedTuple):
    """Way from a variable to an object."""

    start: Start
    hops: tuple[Hop, ...]


def running_frames() -> list[FrameType]:
    """Return the frames of running functions of all threads, this thread's first, the outermost first.

    memlog's frames are left out: a frame that refers to itself through this list would keep objects alive.
    Before Python 3.13 (`LIVE_LOCALS` is false), other threads are left out if one of them may be traced (see
    `memlog._internal.frame_locals`).
    """
    found = _stack(sys._getframe(1))
    if LIVE_LOCALS or (sys.gettrace() is None and threading.gettrace() is None):
        current = threading.get_ident()
        # A variable that refers to this function's own frame would keep the caller's objects alive.
        threads = [frame for key, frame in sys._current_frames().items() if key != current]
        for others in map(_stack, threads):
            if LIVE_LOCALS or all(one.f_trace is None for one in others):
                found += others
    return found


_suspended: dict[tuple[str, str, int], weakref.ref[GeneratorType[Any, Any, Any]]] = {}
"""Generators that `find_suspended` has found, by `identity_of` their code."""


def find_suspended(is_program: Callable[[str], bool]) -> None:
    """Look for suspended generators of the program, so that `variables_of` knows their variables.

    Often no variable refers to a generator: ``for batch in batches()`` keeps it out of Python's sight. Of
    several generators with the same code, the one that was found first counts. ``is_program`` returns whether
    a source file is the program's. This looks at all objects: 15 to 60 ms.
    """
    for one in tracked_objects(
        lambda types: map(operator.is_, types, itertools.repeat(GeneratorType))
    ):
        code = identity_of(one.gi_code)
        if code not in suspended() and is_program(code[1]) and not is_memlog(one.gi_code):
            _suspended[code] = weakref.ref(one)


def suspended() -> list[tuple[str, str, int]]:
    """Return `identity_of` the code of each living generator that `find_suspended` has found."""
    for code in [code for code, known in _suspended.items() if known() is None]:
        del _suspended[code]
    return list(_suspended)


def variables_of(code: tuple[str, str, int]) -> dict[str, Any]:
    """Return the variables of a running function, or else of a suspended generator; empty: there is none.

    ``code`` is `identity_of` the function's code.
    """
    for frame in running_frames():
        if identity_of(frame.f_code) == code:
            return local_variables(frame)
    found = _suspended.get(code, lambda: None)()
    return {} if found is None else _variables_of_generator(found)


def _variables_of_generator(one: GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    frame = one.gi_frame
    return {} if frame is None or one.gi_running else local_variables(frame)


def identity_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_name, code.co_filename, code.co_firstlineno


def path_to(start: Start, chain: list[Any]) -> Path | None:
    """Return the path through a chain of objects, from a variable's value on; ``None``: a name is missing."""
    hops: list[Hop] = []
    at, last = 0, len(chain) - 1
    while at < last:
        near = {id(chain[ahead]): ahead for ahead in range(at + 1, min(at + _AHEAD, last) + 1)}
        found = [
            (kind == "ref", -near[id(one)], (kind, key))
            for kind, key, one in itertools.islice(_names(chain[at]), _MAX_NAMES)
            if id(one) in near
        ]
        if not found:
            return None
        _, ahead, hop = min(found, key=lambda one: one[:2])
        at = -ahead
        hops.append(hop)
    return Path(start, tuple(hops))


def follow(path: Path) -> Chain | None:
    """Return the chain of objects to which a path leads now; ``None`` if it leads nowhere."""
    start = path.start
    variables, root = _variables(start)
    if start.name not in variables:
        return None
    objects = [variables[start.name]]
    for hop in path.hops:
        step = _step(objects[-1], hop)
        if step is None:
            return None
        objects += step
    return Chain(root, tuple(objects))


def _variables(start: Start) -> tuple[dict[str, Any], Root]:
    if start.code is None:
        found = module_namespace(start.place)
        file = found.get("__file__")
        file = file if type(file) is str else ""
        return found, Root("global", start.name, start.place, file)
    return variables_of(start.code), Root("local", start.name, start.code[0], start.code[1])


def _step(owner: Any, hop: Hop) -> list[Any] | None:
    """Return the objects between ``owner`` and the object that a name leads to, and this object."""
    kind, key = hop
    base = container_base(owner)
    if kind == "item" and base is dict and type(key) is str:
        return [dict.__getitem__(owner, key)] if dict.__contains__(owner, key) else None
    if kind == "attr":
        return _attribute(owner, key)
    found = next((one for named, name, one in _names(owner) if (named, name) == hop), _MISSING)
    if found is _MISSING:
        return None
    if kind in ("cell", "default"):
        return [*_between(owner, hop), found]
    return [found]


def _between(function: FunctionType, hop: Hop) -> list[Any]:
    """Return the objects between a function and a value of its closure or its default arguments."""
    kind, key = hop
    if kind == "default":
        return [function.__defaults__]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return [cell for name, cell in cells if name == key]


def _attribute(owner: Any, key: str) -> list[Any] | None:
    if is_kind(owner, type):
        namespace = next((one for one in gc.get_referents(owner) if type(one) is dict), {})
        return [namespace, namespace[key]] if key in namespace else None
    attributes = instance_dict(owner)
    if attributes is not None and key in attributes:
        return [attributes, attributes[key]]
    return next(([one] for name, one in _slots(owner) if name == key), None)


_MISSING: Final = object()


def _names(one: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the objects to which an object refers, each with the kind of its name and the name."""
    base = container_base(one)
    if base is dict:
        pairs = list(dict.items(one))
        yield from (("item", key, value) for key, value in pairs if _is_key(key))
    elif base is list or base is deque:
        yield from (("item", number, value) for number, value in enumerate(base.__iter__(one)))
    elif is_kind(one, tuple):
        yield from (("item", number, value) for number, value in enumerate(tuple.__iter__(one)))
    elif type(one) is FunctionType:
        yield from _of_function(one)
    elif type(one) is GeneratorType:
        yield from (("local", *each) for each in _variables_of_generator(one).items())
    if is_kind(one, type):
        yield from (("attr", *each) for each in list(class_namespace(one).items()))
    else:
        yield from (("attr", *each) for each in list((instance_dict(one) or {}).items()))
        yield from (("attr", *each) for each in _slots(one))
    yield from (("ref", *each) for each in enumerate(gc.get_referents(one)))


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        for value in gc.get_referents(cell):
            yield "cell", name, value
    yield from (("default", *each) for each in enumerate(function.__defaults__ or ()))


def _slots(one: Any) -> Iterator[tuple[str, Any]]:
    for base in bases(type(one)):
        for name, member in class_namespace(base).items():
            if type(member) is MemberDescriptorType and type(name) is str:
                try:
                    yield name, member.__get__(one)
                except AttributeError:  # an empty slot
                    continue


def _is_key(key: Any) -> bool:
    """Return True if a key may be kept: it refers to nothing of the program."""
    if type(key) is tuple:
        return all(type(part) in _KEYS for part in key)
    return type(key) in _KEYS


def _stack(innermost: FrameType) -> list[FrameType]:
    """Return a thread's frames without memlog's, the outermost first."""
    found = []
    frame: FrameType | None = innermost
    while frame is not None:
        if not is_memlog(frame.f_code):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]
