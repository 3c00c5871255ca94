"""Reading a program's objects and variables without running the program's code.

``isinstance``, ``len``, ``getattr`` and ``repr`` may all call methods that a class defines in Python. The
functions in this file use CPython's own types and descriptors instead.

Up to Python 3.12, ``frame.f_locals`` copies a function's variables into a dictionary. The frame keeps the
dictionary and its values alive. Therefore, up to Python 3.12:

* The dictionary is emptied after it was read.
* A function that may call ``locals()`` is not read, because ``locals()`` returns the same dictionary to it.
* No function is read while a trace function is set, because Python may then write the dictionary back into
  the variables.
* The caller must not read functions of other threads unless they show no sign of a trace function
  (`memlog.leaks.owner_chain.running_frames`). Another thread's trace function can't be asked for.
"""

from __future__ import annotations

import dis
import gc
import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import CO_OPTIMIZED
from itertools import chain, compress, islice, repeat, starmap
from types import (
    CodeType,
    FrameType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
)
from typing import Any, Final

_mro: Any = type.__dict__["__mro__"].__get__
_namespace: Any = type.__dict__["__dict__"].__get__
_module_dict: Any = vars(ModuleType)["__dict__"].__get__
_class_name: Any = type.__dict__["__name__"].__get__

CONTAINERS: Final[tuple[type, ...]] = (list, dict, set, deque, bytearray)
"""Types that can grow in place. A subclass counts as its base."""
_LONGEST: Final = 60
"""Maximum number of characters of a shown key or name."""


def bases(kind: type) -> tuple[type, ...]:
    """Return a class and its bases in method resolution order."""
    order: tuple[type, ...] = _mro(kind)
    return order


def is_kind(value: object, kind: type) -> bool:
    """Return whether the real type of ``value`` is ``kind`` or a subclass of it."""
    return any(base is kind for base in bases(type(value)))


def type_name(value: object) -> str:
    """Return the name of the real type of ``value``."""
    return shown(_class_name(type(value)))


def shown(text: object) -> str:
    """Return a ``str`` as one printable line, cut to `_LONGEST` characters. Return ``""`` for other types."""
    if type(text) is not str:
        return ""
    clean = "".join(char if char.isprintable() else "?" for char in text[: _LONGEST + 1])
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}…"


def container_base(value: object) -> type | None:
    """Return the type from `CONTAINERS` to which ``value`` belongs; ``None`` for other values."""
    return container_kind(type(value))


def container_kind(kind: type) -> type | None:
    """Return the type that `container_base` returns for instances of ``kind``."""
    for base in bases(kind):
        for container in CONTAINERS:
            # Compared by identity: a metaclass may define __eq__ and __hash__.
            if base is container:
                return container
    return None


def container_length(value: Any, base: type) -> int:
    """Return the number of elements of a container. ``base`` is the container's `container_base`."""
    return int(base.__len__(value))  # type: ignore[attr-defined] # every base has one


def class_namespace(kind: type) -> Any:
    """Return the namespace of a class as a read-only mapping."""
    return _namespace(kind)


def own_method(value: object, name: str) -> Any:
    """Return a method of ``value`` that is written in C. ``name`` is the method's name.

    The function ignores Python methods and other attributes with this name.

    Raises:
        AttributeError: There is no such method.
    """
    for base in bases(type(value)):
        method = class_namespace(base).get(name)
        if type(method) is MethodDescriptorType:
            return method.__get__(value)
    raise AttributeError(name)


def values_in(value: object, limit: int) -> Iterator[object]:
    """Yield the values in a nested tuple, list or dictionary. If ``value`` is none of these, yield ``value``.

    The function visits at most ``limit`` values. Containers count, too.
    """
    waiting = [value]
    while waiting and limit > 0:
        limit -= 1
        item: Any = waiting.pop()
        kinds = bases(type(item))
        if any(kind is dict for kind in kinds):
            waiting += itertools.islice(dict.values(item), limit)
        elif any(kind is tuple for kind in kinds):
            waiting += itertools.islice(tuple.__iter__(item), limit)
        elif any(kind is list for kind in kinds):
            waiting += itertools.islice(list.__iter__(item), limit)
        else:
            yield item


def instance_dict(value: object) -> dict[Any, Any] | None:
    """Return the ``__dict__`` that CPython made for an object; ``None`` if there is no such ``__dict__``."""
    for base in bases(type(value)):
        descriptor = class_namespace(base).get("__dict__")
        if descriptor is not None:
            if type(descriptor) is not GetSetDescriptorType:
                return None
            try:
                namespace = descriptor.__get__(value)
            except AttributeError:
                return None
            return namespace if type(namespace) is dict else None
    return None


def module_namespace(name: object) -> dict[str, Any]:
    """Return the global variables of an imported module; empty if there is no such module."""
    module = sys.modules.get(name) if type(name) is str else None
    if module is None or not is_kind(module, ModuleType):
        return {}
    namespace = _module_dict(module)  # `instance_dict` does not know a module's descriptor
    return namespace if type(namespace) is dict else {}


def module_file(name: object) -> str:
    """Return the source file of an imported module; empty if unknown."""
    file = module_namespace(name).get("__file__")
    return file if type(file) is str else ""


def attribute_name(owner: object, value: object) -> str | None:
    """Return the name of the attribute or slot in which ``owner`` holds ``value``; ``None`` if not found."""
    attributes = instance_dict(owner)
    if attributes is not None:
        key = key_of(attributes, value)
        if key is not None:
            return key
    for base in bases(type(owner)):
        for name, member in class_namespace(base).items():
            if type(member) is not MemberDescriptorType:
                continue
            with suppress(AttributeError):  # an empty slot
                if member.__get__(owner) is value:
                    return shown(name)
    return None


def key_of(mapping: dict[Any, Any], value: object) -> str | None:
    """Return the string key under which a mapping refers to ``value``; ``None`` if there is none."""
    try:
        for key, held in dict.items(mapping):
            if held is value and type(key) is str:
                return shown(key)
    except RuntimeError:  # another thread changed the mapping meanwhile
        return None
    return None


LIVE_LOCALS: Final = sys.version_info >= (3, 13)
_FRAMES: Final = ("_getframe", "currentframe")
_USES_LOCALS: Final = ("locals", "exec", "eval")
_USES_LOCALS_ALONE: Final = ("vars", "dir")
"""Functions that read the local variables only if they are called without an argument."""
_LOADS: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_PREPARES: Final = ("PUSH_NULL", "CACHE", "PRECALL")
_OWN_REFERENCES: Final = 3
"""Number of references to a frame's dictionary if the user's program does not refer to it. The three are the
frame, a variable in this file, and getrefcount's argument."""


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a function's local variables by name; empty if reading could affect the program.

    For the frame of a module or a class the result is empty.
    """
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:
        return {}
    if LIVE_LOCALS:
        return dict(frame.f_locals)
    if sys.gettrace() is not None or _uses_locals(code):
        return {}
    snapshot = frame.f_locals
    variables = dict(snapshot)
    if sys.getrefcount(snapshot) <= _OWN_REFERENCES:  # otherwise a debugger may use it, too
        snapshot.clear()
    return variables


def _uses_locals(code: CodeType) -> bool:
    """Return whether a function may use the dictionary of its local variables."""
    names = code.co_names
    if any(name in names for name in _FRAMES):
        return True
    if not any(name in names for name in (*_USES_LOCALS, *_USES_LOCALS_ALONE)):
        return False
    instructions = [
        instruction
        for instruction in dis.get_instructions(code)
        if instruction.opname not in _PREPARES
    ]
    for instruction, following in itertools.pairwise(instructions):
        if instruction.opname not in _LOADS:
            continue
        takes_nothing = following.opname.startswith("CALL") and following.arg == 0
        if instruction.argval in _USES_LOCALS or (
            instruction.argval in _USES_LOCALS_ALONE and takes_nothing
        ):
            return True
    return False


def _all_but_tuples(types: Iterator[type]) -> Iterator[bool]:
    return map(operator.is_not, types, repeat(tuple))


def tracked_objects(
    wanted: Callable[[Iterator[type]], Iterator[bool]] = _all_but_tuples,
    listed: Callable[..., list[Any]] = gc.get_objects,
    *arguments: object,
) -> list[Any]:
    """Return the objects that the collector tracks, except tuples.

    Another thread may be in the middle of ``tuple(…)``. Python raises a SystemError there if a second
    reference to the unfinished tuple exists. So the tuples are left out within one call of a C function,
    during which no other thread runs.

    ``wanted`` gets the objects' types, and returns for each whether to return the object. Its iterator must
    run no Python code. ``listed`` is the function of the collector that lists the objects, with its
    ``arguments``.
    """
    # With a variable for the collector's list, another thread could run before the tuples are left out. So
    # the list is made inside the last statement. `twice` yields it two times.
    twice = chain.from_iterable(map(repeat, starmap(listed, (arguments,)), (2,)))
    every, again = (chain.from_iterable(islice(twice, 1)) for _ in range(2))
    is_wanted = wanted(map(type, again))
    # The last two parts yield nothing. They exhaust the iterators, which otherwise would keep the list.
    tracked = list(chain(compress(every, is_wanted), twice, compress(is_wanted, ())))
    # The new list is tracked, too. The collector yields young objects first.
    for place, listed_object in enumerate(tracked):
        if listed_object is tracked:
            del tracked[place]
            break
    return tracked


def referrers(one: object) -> list[Any]:
    """Return the objects that refer to ``one``, except tuples."""
    return tracked_objects(_all_but_tuples, gc.get_referrers, one)


_PER_BLOCK: Final = 0.04e-6
"""Seconds of `instances` or `referrers` for each block of memory that Python's allocator has given out.
Measured were 0.01 to 0.07 µs, less in processes of more blocks."""


def pass_seconds() -> float:
    """Return the seconds that one call of `instances` or `referrers` is expected to take.

    The result is 0 if Python does not use its own allocator. To count the objects would take a third of that
    time, so the blocks of their memory are counted.
    """
    return _PER_BLOCK * sys.getallocatedblocks()


def instances(*classes: type) -> list[Any]:
    """Return all live instances of classes and their subclasses.

    Only types are compared, and without Python code: isinstance() may run a property `__class__` of an
    object, and a loop in Python would take ten times as long.
    """
    kinds = with_subclasses(classes)
    return tracked_objects(lambda types: map(kinds.__contains__, map(id, types)))


def with_subclasses(classes: Iterable[type]) -> dict[int, type]:
    """Return classes and their subclasses by their identities: to hash a class can run Python code."""
    kinds: dict[int, type] = {id(kind): kind for kind in classes}
    waiting = list(kinds.values())
    while waiting:
        inner: list[type] = type.__subclasses__(waiting.pop())
        new = {id(kind): kind for kind in inner if id(kind) not in kinds}
        kinds |= new
        waiting += new.values()
    return kinds
