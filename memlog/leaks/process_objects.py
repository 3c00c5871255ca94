"""Objects of the process by type, and variables of running functions."""

from __future__ import annotations

import gc
import itertools
import operator
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, Final, Generic, NamedTuple, TypeVar

from memlog._internal.inert_access import LIVE_LOCALS, local_variables, tracked_objects
from memlog.leaks.time_budget import TimeBudget

MEMLOG: Final = str(Path(__file__).absolute().parents[1])
"""Folder of memlog."""
_OF_TRAINERS: Final = re.compile(
    r"[/\\]memlog_(accelerate|hydra|keras|lightning|ray|transformers)[/\\]\w+\.py$"
)
"""Files of the integrations, whose functions have the trainer as an argument while a search runs."""


class Variable(NamedTuple):
    """Name of a local variable of a running function, and the function's code."""

    name: str
    code: CodeType


def is_memlog(code: CodeType) -> bool:
    """Return whether a function is memlog's, or of one of its integrations for trainers."""
    return code.co_filename.startswith(MEMLOG) or bool(_OF_TRAINERS.search(code.co_filename))


def running_variables(is_program: Callable[[str], bool]) -> dict[int, Variable]:
    """Return the local variables of all running functions, by the identity of their values.

    If several variables have the same value, the program's variables are preferred to those of packages. A
    caller's variables are preferred to those of the functions that it calls. ``is_program`` returns whether a
    source file is the program's.
    """
    program: dict[int, Variable] = {}
    others: dict[int, Variable] = {}
    for frame in _running_frames():
        found = program if is_program(frame.f_code.co_filename) else others
        for name, value in local_variables(frame).items():
            found[id(value)] = Variable(name, frame.f_code)
    return {**others, **program}


_OF_CODE: Final = frozenset(
    id(kind)
    for kind in (
        tuple,  # see `tracked_objects`
        FunctionType,
        BuiltinFunctionType,
        MethodDescriptorType,
        WrapperDescriptorType,
        GetSetDescriptorType,
        MemberDescriptorType,
        GenericAlias,
        UnionType,
        property,
        staticmethod,
        classmethod,
        weakref.ref,
    )
)
"""Identities of types whose objects describe a program's code. They are more than half of all objects."""


def all_objects() -> list[Any]:
    """Return all objects that can hold data: `tracked_objects`, and untracked values of local variables.

    Objects that a program's code consists of are left out, such as functions and descriptors.
    """
    objects = tracked_objects(
        lambda types: map(operator.not_, map(_OF_CODE.__contains__, map(id, types)))
    )
    for frame in _running_frames():
        objects += itertools.filterfalse(gc.is_tracked, local_variables(frame).values())
    return objects


def _running_frames() -> Iterator[FrameType]:
    """Yield the frames of running functions except memlog's, the innermost first.

    Before Python 3.13 (`LIVE_LOCALS` is false), yield only this thread's frames.
    """
    threads = tuple(sys._current_frames().values()) if LIVE_LOCALS else (sys._getframe(),)
    for innermost in threads:
        frame: FrameType | None = innermost
        while frame is not None:
            if not is_memlog(frame.f_code):
                yield frame
            frame = frame.f_back


_Kind = TypeVar("_Kind")


class KindTable(Generic[_Kind]):
    """Table that maps types to kinds, and selects objects by the kind of their type.

    ``kind_of`` returns the kind of a type, for example the same kind for all subclasses of ``torch.Tensor``;
    ``None`` if objects of the type are of no interest.

    Types are compared by identity. They are not hashed, because hashing can run the code of a metaclass.
    """

    def __init__(self, kind_of: Callable[[type], _Kind | None]) -> None:
        self._kind_of = kind_of
        self._seen: dict[int, type] = {}
        self._kinds: dict[int, _Kind] = {}

    def select_until_spent(
        self, objects: Sequence[Any], budget: TimeBudget
    ) -> Iterator[tuple[Any, _Kind]]:
        """Yield the objects of interest, each with its kind, until the time of ``budget`` is spent."""
        for batch in budget.batches(objects):
            yield from self.select(batch)

    def select(self, objects: Sequence[Any]) -> Iterator[tuple[Any, _Kind]]:
        """Yield the objects of interest, each with its kind."""
        types = list(map(type, objects))
        numbers = list(map(id, types))
        present = dict(zip(numbers, types, strict=True))
        for number in present.keys() - self._seen.keys():
            self._add(number, present[number])
        kinds = self._kinds
        if present.keys().isdisjoint(kinds):
            return
        # Most objects are of no interest. The C function `compress` skips them faster than this loop could.
        pairs = zip(objects, numbers, strict=True)
        for one, number in itertools.compress(pairs, map(kinds.__contains__, numbers)):
            yield one, kinds[number]

    def _add(self, number: int, kind: type) -> None:
        self._seen[number] = kind
        found = self._kind_of(kind)
        if found is not None:
            self._kinds[number] = found
