"""Objects of the process by type, variables of running functions, and the time that a search may take."""

from __future__ import annotations

import gc
import itertools
import math
import operator
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from memlog._internal.inert_access import (
    LIVE_LOCALS,
    local_variables,
    tracked_objects,
    with_subclasses,
)

_SHARE = 0.01
_BATCH = 20_000
_FREE_SECONDS, _EARNED = 0.5, 0.03
_Item = TypeVar("_Item")


def seconds_allowed(least: float, begun: float) -> float:
    """Return the seconds that a kind of work may take: 1 % of the run's time so far, at least ``least``.

    ``begun`` is the start of the run in seconds, as `time.monotonic` returns it.
    """
    return max(least, _SHARE * (time.monotonic() - begun))


class EarnedTime:
    """Processor time for all searches of a run together: half a second, and 3 % of what the run takes itself.

    A search is begun whole or not at all: what it has looked at is of no use without the rest.
    """

    def __init__(self) -> None:
        self._began = time.process_time()
        self._taken = self._longest = 0.0

    @property
    def is_enough(self) -> bool:
        """True if another search, as long as the longest so far, may begin. The first always may."""
        earned = _FREE_SECONDS + _EARNED * (time.process_time() - self._began)
        return self._longest == 0.0 or self._taken + self._longest <= earned

    def take(self, seconds: float) -> None:
        """Count a search that has taken ``seconds``."""
        self._taken += seconds
        self._longest = max(self._longest, seconds)


class TimeBudget:
    """Time limit, in seconds, for several pieces of work together.

    The thread's own processor time counts, so that a busy machine does not cut the work short.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._most = math.inf
        self._began: float | None = None

    @contextmanager
    def running(self, most: float = math.inf) -> Iterator[None]:
        """Count the time of a block. After ``most`` seconds, `spent` is true until the block ends."""
        self._began, self._most = time.thread_time(), most
        try:
            yield
        finally:
            self._left -= self._taken()
            self._began, self._most = None, math.inf

    def take(self, seconds: float) -> None:
        """Subtract the processor seconds that other work has taken."""
        self._left -= seconds

    @property
    def left_in_all(self) -> float:
        """Seconds left for the running block and later blocks; negative if the work took too long."""
        return self._left - self._taken()

    def _taken(self) -> float:
        return 0.0 if self._began is None else time.thread_time() - self._began

    @property
    def spent(self) -> bool:
        """True if no time is left for the running block, or for all blocks together."""
        return min(self.left_in_all, self._most - self._taken()) <= 0

    def batches(self, items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
        """Yield slices of ``items`` until the time is spent."""
        for start in range(0, len(items), _BATCH):
            if self.spent:
                return
            yield items[start : start + _BATCH]


MEMLOG: Final = str(Path(__file__).absolute().parents[1])
"""Folder of memlog."""
_INTEGRATIONS: Final = (
    "accelerate|hydra|keras|lightning|mlflow|otlp|prometheus|pytest|ray|swanlab|tensorboard|trackio"
    "|transformers|wandb|webhook"
)
_FILES: Final = re.compile(rf"[/\\]memlog_({_INTEGRATIONS})[/\\]\w+\.py$")
"""Files of the integrations, whose functions have the trainer as an argument while a search runs."""
_MODULES: Final = re.compile(rf"memlog(_({_INTEGRATIONS}))?(\.|$)")
"""Modules of memlog and of its integrations. A program of a user can have the name ``memlog_test``."""


class Variable(NamedTuple):
    """Name of a local variable of a running function, and the function's code."""

    name: str
    code: CodeType


def is_memlog(code: CodeType) -> bool:
    """Return whether a function is memlog's, or of one of its integrations."""
    return code.co_filename.startswith(MEMLOG) or bool(_FILES.search(code.co_filename))


def is_memlog_module(name: object) -> bool:
    """Return whether a module, or a class's ``__module__``, is memlog's or of one of its integrations."""
    return type(name) is str and _MODULES.match(name) is not None


def running_variables(is_program: Callable[[str], bool]) -> dict[int, Variable]:
    """Return the local variables of all running functions, by the identity of their values.

    If several variables have the same value, the program's variables are preferred to those of packages. A
    caller's variables are preferred to those of the functions that it calls. ``is_program`` returns whether a
    source file is the program's.
    """
    program: dict[int, Variable] = {}
    others: dict[int, Variable] = {}
    for frame in _running_frames():
        variables = program if is_program(frame.f_code.co_filename) else others
        for name, value in local_variables(frame).items():
            # The outermost frames come last: a caller's variable replaces those of called functions.
            variables[id(value)] = Variable(name, frame.f_code)
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
    objects += _untracked()
    return objects


def objects_of(*classes: type) -> list[Any]:
    """Return those of `all_objects` that are instances of classes or of their subclasses.

    This takes half the time of selecting them from all objects.
    """
    wanted = with_subclasses(classes)
    objects = tracked_objects(lambda types: map(wanted.__contains__, map(id, types)))
    objects += (value for value in _untracked() if id(type(value)) in wanted)
    return objects


def _untracked() -> Iterator[Any]:
    for frame in _running_frames():
        yield from itertools.filterfalse(gc.is_tracked, local_variables(frame).values())


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
        for value, number in itertools.compress(pairs, map(kinds.__contains__, numbers)):
            yield value, kinds[number]

    def _add(self, number: int, kind: type) -> None:
        # The type is kept, so that no other type gets its identity.
        self._seen[number] = kind
        mapped = self._kind_of(kind)
        if mapped is not None:
            self._kinds[number] = mapped
