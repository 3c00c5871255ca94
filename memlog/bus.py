"""Publish and subscribe: the one place through which every event passes.

The journal subscribes first, so that what anybody else sees has been written. A subscriber's error is
contained: it reaches neither the other subscribers nor the trainer.
"""

from __future__ import annotations

from collections.abc import Callable

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event


class EventBus:
    """Hands each event to every subscriber, on the publisher's thread, in order of subscription."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._subscribers: tuple[Callable[[Event], object], ...] = ()

    def subscribe(self, subscriber: Callable[[Event], object]) -> None:
        """Adds a subscriber; it sees every event from now on, from any thread."""
        self._subscribers = (*self._subscribers, subscriber)

    def publish(self, event: Event) -> None:
        """Hands ``event`` to every subscriber.

        Never raises, but for what a signal handler of the user's raised meanwhile: after all have had it.
        """
        interruption: Exception | None = None
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception as error:  # noqa: BLE001, PERF203 - memlog's errors end here, not in training
                try:
                    self._diagnostics.fault(f"a subscriber to {type(event).__name__}", error)
                except Exception as raised:  # noqa: BLE001 - a signal handler's: it has to wait for the others
                    interruption = raised
        if interruption is not None:
            try:
                raise interruption
            finally:
                interruption = None  # its traceback holds this frame, and so the user's variables
