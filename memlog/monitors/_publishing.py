"""Where monitors publish: the running session, and the one console subscriber.

Without a session events go nowhere and lines are printed all the same; with a session that is disabled
nothing is published and nothing printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memlog._internal import current_session
from memlog._internal.current_session import Publisher
from memlog._internal.diagnostics import Diagnostics
from memlog.console import Notice, show
from memlog.events import Event


class _MonitorHealth(Diagnostics):
    """Counts in the running session's health, and in its own where there is none."""

    def drop(self, reason: str, message: str, *, count: int = 1) -> None:
        running = session()
        if running is None:
            super().drop(reason, message, count=count)
        else:
            running.health.drop(reason, message, count=count)

    def count_fault(self, cause: str) -> None:
        running = session()
        if running is None:
            super().count_fault(cause)
        else:
            running.health.count_fault(cause)

    def fault(self, where: str, error: BaseException) -> None:
        running = session()
        if running is None:
            super().fault(where, error)
        else:
            running.health.fault(where, error)


HEALTH = _MonitorHealth()
"""Where errors inside the monitors go."""

_print: Callable[[Notice], object] = show
"""The one subscriber that prints."""

T = TypeVar("T")


def silenced() -> bool:
    """Whether a session is running that was switched off: off means off."""
    publisher = current_session.publisher()
    return publisher is not None and not publisher.enabled


def session() -> Publisher | None:
    """The session to publish to; ``None`` where none is running."""
    publisher = current_session.publisher()
    return publisher if publisher is not None and publisher.enabled else None


def publish(event: Event, notice: Notice | None = None, to: Publisher | None = None) -> None:
    """Hands an event to the session, and what a person wants to know of it to the console.

    Args:
        event: What happened.
        notice: What is printed; ``None``: nothing.
        to: The session that was running when it happened; ``None``: the one that is running now.
    """
    target = to or session()
    if target is not None:
        target.publish(event)
    if notice is not None:
        tell(notice)


def tell(notice: Notice) -> None:
    """Prints. Never raises: a closed pipe is no reason to end training."""
    if not silenced():
        with HEALTH.contained("printing"):
            _print(notice)
