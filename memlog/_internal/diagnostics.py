"""Counts of what went wrong and what was dropped, so that nothing disappears in silence."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from memlog._internal import fork
from memlog._internal.redact import without_credentials
from memlog._internal.signals import raised_by_handler

logger = logging.getLogger("memlog")


MAX_SAID = 200
"""Causes that are said: what comes after them is counted alone."""


def warn(message: str, to: logging.Logger = logger) -> bool:
    """Logs a warning. Never raises, but for what a signal handler of the user's raised meanwhile.

    A handler of log lines is the user's own, and so is the stream that it writes to, which may be closed,
    full, or without a reader.

    Returns:
        Whether nothing went wrong.
    """
    try:
        to.warning("%s", message)
    except Exception as error:
        if raised_by_handler(error):
            raise
        return False
    return True


class Diagnostics:
    """Counts drops and faults of one process; says each cause once.

    Attributes:
        dropped: Number of things lost, by reason (``"journal_full"``, ``"rejected"``, …).
        faults: Number of errors inside memlog, by where they happened and their type.
    """

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._said: set[str] = set()
        # A signal handler of the user's may count while its own thread is in here.
        self._lock = threading.RLock()
        fork.renew(self, "_lock", threading.RLock)

    def drop(self, reason: str, message: str, *, count: int = 1) -> None:
        """Counts ``count`` losses for ``reason`` and warns with ``message`` the first time."""
        self._count(self.dropped, reason, count)
        self.say_once(reason, message)

    def drop_each(self, reason: str, message: str) -> None:
        """Counts a loss for ``reason`` and warns with each ``message`` once."""
        self._count(self.dropped, reason, 1)
        self.say_once(message, message)

    def fault(self, where: str, error: BaseException) -> None:
        """Counts an error inside memlog; training goes on.

        Raises:
            BaseException: ``error`` itself, where a signal handler of the user's raised it: it is no error
                of memlog's, and whoever waits for it is further out.
        """
        if raised_by_handler(error):
            try:
                raise error
            finally:
                del (
                    error
                )  # its traceback holds this frame, and so the user's variables, in a circle
        cause = f"{where}: {type(error).__name__}"
        self.count_fault(cause)
        self.say_once(
            cause, f"{where} failed ({_shown(error)}); training goes on, this is said once"
        )

    def count_fault(self, cause: str) -> None:
        """Counts an error inside memlog of which its caller says what there is to say."""
        self._count(self.faults, cause, 1)

    def _count(self, counts: Counter[str], cause: str, count: int) -> None:
        with self._lock:
            # Once there is a figure, adding to it is one step for Python: a signal handler that counts, too,
            # comes before it or after it.
            counts.setdefault(cause, 0)
            counts[cause] += count

    def say_once(self, cause: str, message: str) -> None:
        """Logs ``message`` as a warning, once for each ``cause``."""
        with self._lock:
            if cause in self._said or len(self._said) >= MAX_SAID:
                return
            self._said.add(cause)
        if not warn(f"memlog: {message}"):
            self.count_fault("a handler of log lines, or its stream")

    @contextmanager
    def contained(self, where: str) -> Iterator[None]:
        """Runs a block whose errors must not reach the trainer."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the one place that keeps memlog's errors from training
            self.fault(where, error)

    @contextmanager
    def contained_callback(self, where: str) -> Iterator[None]:
        """Runs a function of the user's that was handed over: not even ``sys.exit`` in it ends training.

        Ctrl-C alone passes, and what a signal handler raises: it is the user's own wish, and comes at
        whatever moment.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit in a loss hangs optimisers
            self.fault(where, error)


def _shown(error: BaseException) -> str:
    """Without what it holds of passwords; an error of the user's own may be unable to show itself."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "no more files can be opened: close some, or raise the limit with `ulimit -n`"
    try:
        return without_credentials(repr(error))
    except Exception as of_its_own:
        if raised_by_handler(of_its_own):
            raise
        return type(error).__name__
