"""Publishing by monitors: events go to the running session, lines to the console.

If no session runs, lines are printed and events are dropped. If a disabled session runs, nothing is published
or printed.
"""

from __future__ import annotations

from collections.abc import Callable

from memlog._internal import current_session, terminal
from memlog._internal.current_session import Publisher
from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event


class _MonitorDiagnostics(Diagnostics):
    """Counter of the monitors' errors.

    If a session runs, the errors are counted in the session's health; otherwise in this object.
    """

    def drop(self, reason: str, message: str, *, count: int = 1) -> None:
        running = session()
        if running is None:
            super().drop(reason, message, count=count)
        else:
            running.health.drop(reason, message, count=count)

    def fault(self, where: str, error: BaseException) -> None:
        running = session()
        if running is None:
            super().fault(where, error)
        else:
            running.health.fault(where, error)


HEALTH = _MonitorDiagnostics()
"""Counter of errors inside the monitors."""


def silenced() -> bool:
    """Return True if the current session is disabled. Monitors must then do nothing."""
    publisher = current_session.publisher()
    return publisher is not None and not publisher.enabled


def session() -> Publisher | None:
    """Return the session to publish to; ``None`` if no enabled session runs."""
    publisher = current_session.publisher()
    return publisher if publisher is not None and publisher.enabled else None


def publish(event: Event) -> None:
    """Publish an event to the running session, if there is one."""
    running = session()
    if running is not None:
        running.publish(event)


def print_notice(lines: Callable[..., str], *values: object) -> None:
    """Print the text that ``lines`` returns for ``values``, unless the text is empty. Never raises.

    ``lines`` is a function of `memlog.console`.
    """
    if not silenced():
        with HEALTH.contained("printing"):
            if text := lines(*values):
                terminal.out(text)
