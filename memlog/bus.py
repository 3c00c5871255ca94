"""Publish and subscribe: every event passes through this bus.

The journal subscribes first. So an event is written before any other subscriber receives it. An error in a
subscriber reaches neither the other subscribers nor the trainer.
"""

from __future__ import annotations

from collections.abc import Callable

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event


class EventBus:
    """Bus that passes each event to every subscriber, on the publisher's thread, in order of subscription."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._subscribers: tuple[Callable[[Event], object], ...] = ()

    def subscribe(self, subscriber: Callable[[Event], object]) -> None:
        """Add a subscriber. It receives every later event, from any thread."""
        self._subscribers = (*self._subscribers, subscriber)

    def publish(self, event: Event) -> None:
        """Pass ``event`` to every subscriber.

        An error of memlog is never raised. If a signal handler of the user raises an exception meanwhile, the
        exception is raised again after every subscriber has received the event.
        """
        interruption: Exception | None = None
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception as error:  # noqa: BLE001, PERF203 - memlog's errors end here, not in training
                try:
                    self._diagnostics.fault(f"a subscriber to {type(event).__name__}", error)
                except Exception as raised:  # noqa: BLE001 - from a signal handler: raised after the loop
                    interruption = raised
        if interruption is not None:
            try:
                raise interruption
            finally:
                interruption = None  # its traceback holds this frame, and so the user's variables
