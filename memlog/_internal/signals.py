"""Distinction between memlog's errors and exceptions that a user's signal handler raises inside memlog.

A signal handler can run between any two instructions, also inside memlog. The handler's exception, such as a
timeout, is meant for the training loop and must reach the loop.
"""

from __future__ import annotations

from itertools import pairwise
from types import FrameType

_TAKES_ANY_NUMBER = 0x04
"""Flag of a code object with an ``*args`` parameter, the same as `inspect.CO_VARARGS`."""


def raised_by_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised ``error``.

    The function looks in the traceback for a call with two arguments: a number, and the frame of the calling
    code. Python calls a signal handler in this way. An ordinary call has no such arguments.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if _handles_a_signal(trace.tb_next.tb_frame, interrupted=trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _handles_a_signal(frame: FrameType, interrupted: FrameType) -> bool:
    code, values = frame.f_code, frame.f_locals
    names = list(code.co_varnames[: code.co_argcount])
    if code.co_flags & _TAKES_ANY_NUMBER:
        names.append(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
    arguments: list[object] = []
    for name in names:
        value = values.get(name)
        arguments += value if isinstance(value, tuple) else (value,)
    return any(isinstance(s, int) and f is interrupted for s, f in pairwise(arguments))
