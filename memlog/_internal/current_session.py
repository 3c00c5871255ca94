"""The running session, for modules that must not import `memlog.session`.

`memlog.session` sets the running session. A monitor, for example of a loss function, publishes
its events to this session. At every call, the monitor asks this module for the session. If none runs, the
monitor publishes nothing. So a monitor can be created before ``init`` and used after ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Event


class Publisher(Protocol):
    """The part of a session that a monitor uses. No method raises."""

    @property
    def enabled(self) -> bool:
        """True if the session records."""

    @property
    def health(self) -> Diagnostics:
        """Counter of errors inside memlog."""

    @property
    def announced(self) -> bool:
        """True if the session has printed that monitoring is on."""

    def publish(self, event: Event) -> None:
        """Put an event on the bus."""

    def claim_steps(self, *, only_first: bool = False) -> None:
        """See `memlog.session.trainers.TrainerInterface.claim_steps`."""

    def count_step(self, step: int | None = None) -> tuple[int, Batch | None] | None:
        """See `memlog.session.trainers.TrainerInterface.count_step`."""

    def open_phase(self, name: str) -> object | None:
        """See `memlog.session.trainers.TrainerInterface.open_phase`."""

    def close_phase(self, phase: object, error: str | None = None) -> None:
        """See `memlog.session.trainers.TrainerInterface.close_phase`."""

    def next_evaluation(self) -> int:
        """Return the number of the next evaluation, counted from 0 over all watched loss functions."""


_publisher: Publisher | None = None
_begin: Callable[[], object] | None = None
_before_finish: list[Callable[[float], None]] = []


def publisher() -> Publisher | None:
    """Return the running session, enabled or not; ``None`` if no session runs.

    If `begin_on_demand` has set a function, `publisher` calls it first.
    """
    if _begin is not None:
        _begin()
    return _publisher


def set_publisher(new: Publisher | None) -> None:
    """Set the running session; ``None``: no session runs.

    If ``new`` is a session, also remove the function that `begin_on_demand` has set.
    """
    global _publisher  # noqa: PLW0603 - the one place that holds it
    _publisher = new
    if new is not None:
        begin_on_demand(None)


def begin_on_demand(begin: Callable[[], object] | None) -> None:
    """Set the function that `publisher` calls to begin a session when none runs; ``None``: no function."""
    global _begin  # noqa: PLW0603 - the one place that holds it
    _begin = begin


def on_demand() -> bool:
    """Return True if the next call of `publisher` begins a session."""
    return _begin is not None


def before_finish(settle: Callable[[float], None]) -> None:
    """Register ``settle``, a function that waits until pending events are published.

    Before a session ends, memlog calls ``settle`` with a time limit in seconds.
    """
    _before_finish.append(settle)


def settle(seconds: float) -> None:
    """Call every function that `before_finish` registered, each with the time limit ``seconds``."""
    for callback in _before_finish:
        callback(seconds)
