"""Status of a run's end, derived from the exception that is being raised."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from memlog.events import LOST_CONNECTION, Status
from memlog.oom.exit_calls import exiting

_LOST_CONNECTION = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|remote process exited|pair closure|ncclRemoteError"
    r"|Timed out waiting \d+ms|collective operation timeout|communicator was aborted|Socket Timeout"
    r"|failed to (?:recv|send)"
)
"""Messages of torch.distributed (gloo, NCCL, TCPStore) about another process that is gone."""


def reason_of(status: Status, error: BaseException | None) -> str | None:
    """Return `LOST_CONNECTION` or the exception's type for a failed run; ``None`` for other ends.

    The exception's message is left out, because it may contain the user's data.
    """
    if status != "failed" or error is None:
        return None
    # torch.distributed raises RuntimeError and classes derived from it.
    if isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)):
        return LOST_CONNECTION
    return type(error).__name__


def status_of(error: BaseException | None) -> Status:
    """Return ``finished`` for ``None`` or ``sys.exit(0)``, ``killed`` if interrupted, else ``failed``."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished"
    return "killed" if isinstance(error, KeyboardInterrupt) or _is_cancelled(error) else "failed"


def error_at_exit() -> BaseException | None:
    """Return the exception that ended a script that never called ``finish``.

    Errors in an interactive shell do not count. At exit, Python does not report ``sys.exit(1)``. A script
    that ends with ``sys.exit(1)`` therefore counts as finished. The script counts as failed if this
    ``SystemExit`` leaves a session's ``with`` block, or if an allocation on a device has failed since the
    last complete step (`memlog.oom.exit_calls`).
    """
    if hasattr(sys, "ps1"):
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return exiting() if error is None else error


def is_a_child_of_multiprocessing() -> bool:
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def finish_with_the_child(finish: Callable[[Status], None]) -> None:
    """Call ``finish`` with the status of this ``multiprocessing`` child when the child ends.

    The child may skip Python's exit handlers, but the child runs its finalizers. A finalizer knows the
    status, because the child's exception is then still being raised.
    """
    if not is_a_child_of_multiprocessing():
        return
    from multiprocessing.util import Finalize  # noqa: PLC0415 - already imported in such a child

    Finalize(None, lambda: finish(status_of(sys.exc_info()[1])), exitpriority=100)
    _finish_with_the_pool(finish)


def _finish_with_the_pool(finish: Callable[[Status], None]) -> None:
    """Call ``finish`` if this is a worker of a ``Pool`` that is ended while it waits for a task.

    ``with Pool() as pool:`` ends the workers by SIGTERM when all tasks are done. Without a handler, the run
    of a training that is complete would count as killed. A worker that is ended within a task, and one with
    a handler of the program's, end as before.
    """
    if (
        "multiprocessing.pool" not in sys.modules
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        return
    import inspect  # noqa: PLC0415 - torch has loaded it, `import memlog` need not
    from multiprocessing.pool import worker  # type: ignore[attr-defined] # noqa: PLC0415 - loaded already

    def calls_until_the_pools_loop(frame: FrameType | None) -> list[str] | None:
        """Return the modules of the calls made by the loop, inner first; ``None`` outside of the loop."""
        modules: list[str] = []
        while frame is not None and frame.f_code is not worker.__code__:
            modules.append(str(frame.f_globals.get("__name__")))
            frame = frame.f_back
        return None if frame is None else modules

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        modules = calls_until_the_pools_loop(frame)
        if modules is None:
            return  # the loop has ended, so the finalizers are running: the process ends after `finish`
        if all(module.startswith("multiprocessing.") for module in modules):
            finish("finished")
        os.kill(os.getpid(), number)

    if calls_until_the_pools_loop(inspect.currentframe()) is not None:
        signal.signal(signal.SIGTERM, end)


def _is_cancelled(error: BaseException) -> bool:
    """Return True if the error is the cancellation of an asyncio task.

    If the user presses Ctrl-C, a coroutine gets this error instead of KeyboardInterrupt. Later, `asyncio.run`
    raises KeyboardInterrupt in the code that called it.
    """
    exceptions = sys.modules.get("asyncio.exceptions")
    return exceptions is not None and isinstance(error, exceptions.CancelledError)
