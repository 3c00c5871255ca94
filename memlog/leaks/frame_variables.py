"""Local variables of frames.

Up to Python 3.12, ``frame.f_locals`` copies a function's variables into a dictionary that stays with the
frame, and would keep the values alive. So the dictionary is emptied again. A function that may use this
dictionary itself (through ``locals()``, for example) is left out.
"""

from __future__ import annotations

import dis
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

_LIVE_LOCALS: Final = sys.version_info >= (3, 13)
_USES_LOCALS: Final = ("locals", "vars", "exec")
_LOADS: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_PREPARES: Final = ("PUSH_NULL", "CACHE", "PRECALL")
_MAX_FRAMES: Final = 300
MEMLOG: Final = str(Path(__file__).absolute().parents[1])
"""Folder of memlog."""


class Variable(NamedTuple):
    """A local variable of a running function.

    Attributes:
        name: Its name.
        code: Code of the function.
    """

    name: str
    code: CodeType


def is_memlog(code: CodeType) -> bool:
    """Return whether code is memlog's."""
    return code.co_filename.startswith(MEMLOG)


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a function's local variables by name; empty if they can't be read without a trace."""
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:
        return {}  # a module's or a class's namespace
    if _LIVE_LOCALS:
        return dict(frame.f_locals)
    if sys.gettrace() is not None or _uses_locals(code):
        return {}
    snapshot = frame.f_locals
    variables = dict(snapshot)
    snapshot.clear()
    return variables


def _uses_locals(code: CodeType) -> bool:
    """Return whether a function calls ``locals()``, ``vars()`` or ``exec``; ``vars(args)`` is harmless."""
    if not any(name in code.co_names for name in _USES_LOCALS):
        return False
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _PREPARES]
    for one, following in itertools.pairwise(instructions):
        if one.opname in _LOADS and one.argval in _USES_LOCALS:
            takes_nothing = following.opname.startswith("CALL") and following.arg == 0
            if one.argval != "vars" or takes_nothing:
                return True
    return False


def running_variables(is_program: Callable[[str], bool]) -> dict[int, Variable]:
    """Return the local variables of all running functions, by the identity of their values.

    Args:
        is_program: Function that returns whether a source file is the program's. Its variables win over those
            of packages, and those of callers over those of the functions that they call.
    """
    program: dict[int, Variable] = {}
    others: dict[int, Variable] = {}
    for frame in _running_frames():
        found = program if is_program(frame.f_code.co_filename) else others
        for name, value in local_variables(frame).items():
            found[id(value)] = Variable(name, frame.f_code)
    return {**others, **program}


def all_objects() -> list[Any]:
    """Return all objects that the collector tracks, and what else running functions refer to."""
    objects = gc.get_objects()
    for frame in _running_frames():
        objects += itertools.filterfalse(gc.is_tracked, local_variables(frame).values())
    return objects


def _running_frames() -> Iterator[FrameType]:
    """Yield the frames of all threads but memlog's, each thread's innermost first."""
    for innermost in tuple(sys._current_frames().values()):
        frame: FrameType | None = innermost
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            if not is_memlog(frame.f_code):
                yield frame
            frame = frame.f_back
