"""Telling the user's own exceptions from memlog's errors.

A signal handler runs between any two instructions, so also inside memlog: what it raises, such as the end
of a time limit, is meant for the training loop and must reach it.
"""

from __future__ import annotations

from itertools import pairwise
from types import FrameType

_TAKES_ANY_NUMBER = 0x04
"""Of a code object's flags, by `inspect.CO_VARARGS`: there is an ``*args``."""


def raised_by_handler(error: BaseException) -> bool:
    """Whether ``error`` comes from a signal handler that interrupted the code which it then went through.

    A handler's frame is known by its arguments: a signal's number and, as no ordinary call has it, the very
    frame that it interrupted.
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
