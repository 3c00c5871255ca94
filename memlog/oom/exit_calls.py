"""Calls of ``sys.exit`` after a failed allocation that the program caught.

At exit, Python tells no exit handler that ``sys.exit(1)`` ends the program. A script that catches the error
of a failed allocation, prints a message and calls ``sys.exit(1)`` would count as finished. So after a failed
allocation, and not before, ``sys.exit`` is a function that passes each call on to the original.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

_original: Callable[..., NoReturn] | None = None
_wrapper: Callable[..., NoReturn] | None = None
_exiting: SystemExit | None = None


def watch(called: Callable[[SystemExit], bool]) -> None:
    """Call a function with each exit with an error that the main thread asks for, until `stop`.

    If the function returns True, `exiting` returns this exit. The function must not raise.
    """
    global _original, _wrapper
    if _wrapper is not None:
        return
    original = sys.exit

    @functools.wraps(original)
    def passing_on(*arguments: Any, **named: Any) -> NoReturn:
        global _exiting  # noqa: PLW0603 - the process ends once
        if _original is not None and threading.current_thread() is threading.main_thread():
            code = next(iter((*arguments, *named.values())), None)
            asked = SystemExit(code)
            _exiting = asked if code and called(asked) else None
        original(*arguments, **named)

    _original, _wrapper = original, passing_on
    sys.exit = passing_on


def stop() -> None:
    """Set ``sys.exit`` to the original, unless another package has replaced it meanwhile."""
    global _original, _wrapper  # noqa: PLW0603 - see `watch`
    if _original is not None and sys.exit is _wrapper:
        sys.exit = _original
    _original = _wrapper = None


def exiting() -> SystemExit | None:
    """Return the exit that the program asked for after a failed allocation; ``None``: none."""
    return _exiting
