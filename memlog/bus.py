"""Publish and subscribe: every event passes through this bus.

The journal subscribes first. So an event is written before any other subscriber receives it. An error in a
subscriber reaches neither the other subscribers nor the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event

Subscriber: TypeAlias = Callable[[Event], object]


class EventBus:
    """Bus that passes each event to every subscriber, on the publisher's thread, in order of subscription."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._subscribers: tuple[tuple[Subscriber, tuple[type[Event], ...]], ...] = ()
        self._by_kind: dict[type[Event], tuple[Subscriber, ...]] = {}
        """Subscribers by type of event. A type is added when its first event is published."""

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> None:
        """Add a subscriber. It receives every later event of the types ``kinds``, from any thread.

        Without ``kinds``, it receives events of every type.
        """
        self._subscribers = (*self._subscribers, (subscriber, kinds))
        self._by_kind = {}

    def publish(self, event: Event) -> None:
        """Pass ``event`` to every subscriber.

        An error of memlog is never raised. If a signal handler of the user raises an exception meanwhile, the
        exception is raised again after every subscriber has received the event.
        """
        interruption: Exception | None = None
        subscribers = self._by_kind.get(type(event))
        if subscribers is None:
            subscribers = self._by_kind[type(event)] = tuple(
                subscriber
                for subscriber, kinds in self._subscribers
                if not kinds or isinstance(event, kinds)
            )
        for subscriber in subscribers:
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
