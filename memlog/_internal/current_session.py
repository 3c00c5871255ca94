"""The session that is running, as those below it may know it: a place to publish to.

`memlog.session` puts it here; the monitors, which can be used without a session, look it up at every
call, so that they may be made before ``init`` and outlive ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Event


class Publisher(Protocol):
    """What monitors need of a session. Nothing here raises."""

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""

    @property
    def health(self) -> Diagnostics:
        """Where errors inside memlog are counted."""

    @property
    def announced(self) -> bool:
        """Whether it has said on the console that monitoring is on."""

    def publish(self, event: Event) -> None:
        """Puts an event on the bus."""

    def claim_steps(self) -> None:
        """From now on the caller alone counts steps."""

    def count_step(self) -> tuple[int, Batch | None] | None:
        """A step is over: its number, and its event where one was published; ``None``: nobody counts."""

    def next_evaluation(self) -> int:
        """The number of the next evaluation of a loss function, from 0."""


_publisher: Publisher | None = None
_begin: Callable[[], object] | None = None
_before_finish: list[Callable[[float], None]] = []


def publisher() -> Publisher | None:
    """The running session, enabled or not; ``None`` where there is none."""
    if _begin is not None:
        _begin()
    return _publisher


def set_publisher(new: Publisher | None) -> None:
    """Says which session is running; one that runs needs not be begun on demand any more."""
    global _publisher  # noqa: PLW0603 - the one place that holds it
    _publisher = new
    if new is not None:
        begin_on_demand(None)


def begin_on_demand(begin: Callable[[], object] | None) -> None:
    """Sets what is called when somebody wants to publish and no session has begun; ``None``: nothing."""
    global _begin  # noqa: PLW0603 - the one place that holds it
    _begin = begin


def on_demand() -> bool:
    """Whether a session would be begun for whoever wants to publish."""
    return _begin is not None


def before_finish(settle: Callable[[float], None]) -> None:
    """Registers what publishes late: called before a session ends, with the seconds that it may take."""
    _before_finish.append(settle)


def settle(seconds: float) -> None:
    """Lets everybody publish what is still to come."""
    for callback in _before_finish:
        callback(seconds)
