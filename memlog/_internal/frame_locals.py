"""Local variables of running functions, read without an effect on the program.

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
import itertools
import sys
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any, Final

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
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _PREPARES]
    for one, following in itertools.pairwise(instructions):
        if one.opname not in _LOADS:
            continue
        takes_nothing = following.opname.startswith("CALL") and following.arg == 0
        if one.argval in _USES_LOCALS or (one.argval in _USES_LOCALS_ALONE and takes_nothing):
            return True
    return False
