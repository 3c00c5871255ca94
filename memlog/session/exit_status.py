"""How a run ended, as far as the exception tells that is on its way."""

from __future__ import annotations

import sys
from collections.abc import Callable

from memlog.events import Status


def status_of(error: BaseException | None) -> Status:
    """``killed`` where it was ended from outside, ``failed`` where it failed by itself."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished"
    return "killed" if isinstance(error, KeyboardInterrupt) or _is_cancelled(error) else "failed"


def error_at_exit() -> BaseException | None:
    """What ended a script that never called ``finish``.

    A shell's past errors say nothing of its end. Nor does Python tell at exit of a ``sys.exit(1)``: that
    counts as finished, unless it leaves a ``with`` block or ``finish`` was told.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def finish_with_the_child(finish: Callable[[Status], None]) -> None:
    """Ends the run of a ``multiprocessing`` child, which may leave without Python's exit handlers.

    Its finalizers run while the exception that ends it, or its ``sys.exit``, is on its way.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return
    from multiprocessing.util import Finalize  # noqa: PLC0415 - such a child has it

    Finalize(None, lambda: finish(status_of(sys.exc_info()[1])), exitpriority=100)


def _is_cancelled(error: BaseException) -> bool:
    """Ctrl-C reaches a coroutine as its task's cancellation; `asyncio.run` raises it again further out."""
    exceptions = sys.modules.get("asyncio.exceptions")
    return exceptions is not None and isinstance(error, exceptions.CancelledError)
