"""Variables of a running function, read without an effect on the program.

Up to Python 3.12, ``frame.f_locals`` of a function fills a dictionary that stays in the frame. It would keep
the program's objects alive, so it is emptied again. It is also the dictionary that ``locals()`` gave the
program, so a function that uses ``locals()`` or the like is not looked at. While a trace function is set, no
function is: Python may write the dictionary back into the variables.
"""

from __future__ import annotations

import sys
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Final

_MOST: Final = 300
"""Maximum number of variables of a frame."""
_LIVE_LOCALS: Final = sys.version_info >= (3, 13)
_UNSHARED: Final = 3
"""References to a frame's dictionary: the frame's, a variable's and an argument's."""
_USES_LOCALS: Final = ("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe")


def variables(frame: FrameType) -> list[tuple[str, object]]:
    """Return the names and values of a frame's variables. The list keeps the values alive."""
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:
        namespace = frame.f_locals  # a module's or a class's own: nothing is copied
        if type(namespace) is not dict:
            return []
        return [(name, namespace[name]) for name in code.co_names[:_MOST] if name in namespace]
    if not _LIVE_LOCALS and (
        sys.gettrace() is not None or any(name in code.co_names for name in _USES_LOCALS)
    ):
        return []
    snapshot = frame.f_locals
    names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)[:_MOST]
    try:
        return [(name, snapshot[name]) for name in names if name in snapshot]
    finally:
        # A debugger may hold the dictionary, too.
        if not _LIVE_LOCALS and sys.getrefcount(snapshot) <= _UNSHARED:
            snapshot.clear()
