"""Distinction between memlog's errors and exceptions that a user's signal handler raises inside memlog.

A signal handler can run between any two instructions, also inside memlog. The handler's exception, such as a
timeout, is meant for the training loop and must reach the loop.
"""

from __future__ import annotations

import signal
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType

_TAKES_ANY_NUMBER = 0x04
"""Flag of a code object with an ``*args`` parameter, the same as `inspect.CO_VARARGS`."""


def raised_by_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised ``error``.

    The function looks in the traceback for a call with two arguments: a number, and the frame of the calling
    code. Python calls a signal handler in this way. An ordinary call has no such arguments. The frame itself
    knows its caller: the traceback lacks the caller if Python was importing a module, because an import
    removes its own frames from tracebacks. A handler that has deleted its arguments is recognised by its
    code while it is installed.
    """
    trace = error.__traceback__
    installed = {_code(signal.getsignal(number)) for number in signal.valid_signals() if trace}
    while trace is not None:
        if trace.tb_frame.f_code in installed or _handles_a_signal(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _handles_a_signal(frame: FrameType) -> bool:
    code, values, interrupted = frame.f_code, frame.f_locals, frame.f_back
    if interrupted is None:
        return False
    names = list(code.co_varnames[: code.co_argcount])
    if code.co_flags & _TAKES_ANY_NUMBER:
        names.append(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
    arguments: list[object] = []
    for name in names:
        value = values.get(name)
        arguments += value if isinstance(value, tuple) else (value,)
    return any(isinstance(s, int) and f is interrupted for s, f in pairwise(arguments))


def _code(handler: object) -> CodeType | None:
    """Return the code that runs first when ``handler`` is called; ``None`` if it is not Python's."""
    while isinstance(handler, partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
