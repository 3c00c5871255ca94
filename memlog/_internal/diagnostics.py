"""Counts of errors inside memlog and of dropped events, so that none goes unnoticed."""

from __future__ import annotations

import errno
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from memlog._internal import processes
from memlog._internal.redact import without_credentials
from memlog._internal.signals import raised_by_handler
from memlog._internal.terminal import one_line

if TYPE_CHECKING:
    import logging

_T = TypeVar("_T")

_MAX_LOGGED = 200
"""Maximum number of different causes that are logged. Further causes are only counted."""

REPORT_STEPS = (
    "call session.step() after each step, or use memlog's monitors, "
    "memlog_keras or memlog.watch_loss"
)
"""What a program does whose steps memlog does not notice."""
NOT_NOTICED = f"memlog noticed no optimizer step: {REPORT_STEPS}"
"""Message of a run that recorded nothing, with the remedy. It names no cause, as memlog knows none."""


def warn(message: str, to: logging.Logger | None = None) -> bool:
    """Log a warning. Return False if logging failed.

    Logging fails, for example, if the user's log handler writes to a closed stream. If a signal handler of
    the user raises an exception, `warn` raises it, too.
    """
    message = one_line(message)
    try:
        try:
            import logging  # noqa: PLC0415 - most programs get no warning
        except OSError:  # the process can open no more files
            sys.stderr.write(f"{message}\n")  # as logging does if the program has set up nothing
            return True
        (to or logging.getLogger("memlog")).warning("%s", message)
    except Exception as error:
        if raised_by_handler(error):
            raise
        return False
    return True


class Diagnostics:
    """Counter of one process's losses (drops) and of memlog's own errors (faults). It logs each cause once.

    Attributes:
        dropped: Number of lost events, points or files by reason (``"journal_full"``, ``"rejected"``, …).
        faults: Number of errors inside memlog by activity and exception type.
    """

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._logged: set[str] = set()
        # A signal handler may count while its own thread holds the lock.
        self._lock = threading.RLock()
        processes.renew(self, "_lock", threading.RLock)

    def drop(self, reason: str, message: str, *, count: int = 1) -> None:
        """Count ``count`` dropped items for ``reason``; log ``message`` the first time."""
        self._count(self.dropped, reason, count)
        self.say_once(reason, message)

    def drop_each(self, reason: str, message: str) -> None:
        """Count one dropped item for ``reason``; log each different ``message`` once."""
        self._count(self.dropped, reason, 1)
        self.say_once(message, message)

    def fault(self, where: str, error: BaseException) -> None:
        """Count and log an error inside memlog, so that training goes on.

        ``where`` is the activity that failed, as the subject of a sentence ("writing the journal").

        Raises:
            BaseException: ``error`` itself, if a signal handler of the user raised it. The user's code
                expects this exception.
        """
        if raised_by_handler(error):
            try:
                raise error
            finally:
                # The error's traceback holds this frame, which holds the error: a reference cycle that would
                # keep the user's variables alive.
                del error
        cause = f"{where}: {type(error).__name__}"
        self.count_fault(cause)
        self.say_once(
            cause, f"{where} failed ({_shown(error)}); training goes on, and memlog logs this once"
        )

    def count_fault(self, cause: str) -> None:
        """Count an error inside memlog, and log nothing."""
        self._count(self.faults, cause, 1)

    def _count(self, counts: Counter[str], cause: str, count: int) -> None:
        with self._lock:
            # With the key present, Python runs no signal handler within `+=`. Without it, a handler could run
            # in Counter.__missing__, which is Python code, and a count that the handler adds would be lost.
            counts.setdefault(cause, 0)
            counts[cause] += count

    def say_once(self, cause: str, message: str) -> None:
        """Log ``message`` as a warning, once for each ``cause``."""
        with self._lock:
            if cause in self._logged or len(self._logged) >= _MAX_LOGGED:
                return
            self._logged.add(cause)
        if not warn(f"memlog: {message}"):
            self.count_fault("logging a warning")

    @contextmanager
    def contained(self, where: str) -> Iterator[None]:
        """Run a block whose errors must not reach the training loop; count them as faults."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the one place that keeps memlog's errors from training
            self.fault(where, error)

    def contained_callback(
        self, where: str, callback: Callable[[_T], object] | None
    ) -> Callable[[_T], None]:
        """Return a function that calls the user's callback and counts its errors, even ``SystemExit``.

        Only Ctrl-C and exceptions of the user's signal handlers are raised, because they concern the
        program, not the callback. If ``callback`` is ``None``, the returned function does nothing.
        """

        def call(argument: _T) -> None:
            if callback is None:
                return
            try:
                callback(argument)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - in a loss, SystemExit hangs some optimisers
                self.fault(where, error)

        return call


def _shown(error: BaseException) -> str:
    """Return an error as text without passwords; only the type's name if the error's ``__repr__`` fails."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "no more files can be opened: close some, or raise the limit with `ulimit -n`"
    try:
        return without_credentials(repr(error))
    except Exception as of_its_own:
        if raised_by_handler(of_its_own):
            raise
        return type(error).__name__
