"""Searches in the training process: for what holds memory, and for gradients that nothing uses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Event, Trace
from memlog.facts.rises import EarlyRises, Rise

if TYPE_CHECKING:
    from memlog.facts.judge import GrowthNews
    from memlog.leaks.wasted_gradients import WastedGradients
    from memlog.session.growth_search import GrowthSearch

_EARLY_SEARCHES = 2
"""Maximum number of searches in a run that begin before the growth test suspects growth."""
_RECENT = 500
"""Number of steps. If a rise ended earlier than this, no search begins."""


class StepSearches:
    """The searches. They begin when they are asked for, so a healthy run imports little of their code.

    Args:
        publish: Function that publishes an event.
        diagnostics: Counts of errors.
        is_traced: Function that returns whether the current step is traced.
        last_step: Function that returns the number of the last step.
        layers: True if steps are also searched for gradients that nothing uses, even if memory is steady.

    Attributes:
        is_ending: True while the steps so far are judged as if the run had ended.
        follows_steps: True if `after_step` has work to do at each step.
        follow_steps: Function called when ``follows_steps`` has become True.
    """

    def __init__(
        self,
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        is_traced: Callable[[], bool],
        last_step: Callable[[], int],
        *,
        layers: bool,
    ) -> None:
        self._publish = publish
        self._diagnostics = diagnostics
        self._is_traced = is_traced
        self._last_step = last_step
        self._layers = layers
        self._begun = time.monotonic()
        self._traces: list[Trace] = []
        self._growth: GrowthSearch | None = None
        self._wasted: WastedGradients | None = None
        self._early: EarlyRises | None = EarlyRises()
        """Watch over the steps until the helper process follows them."""
        self._early_searches = 0
        if layers:
            _load_waste_search()
        self.is_ending = False
        self.follows_steps = True
        self.follow_steps: Callable[[], object] = lambda: None

    @property
    def searching(self) -> bool:
        """True while steps are searched for objects that hold memory, or for gradients that nothing uses."""
        return self._is_inquiring or (self._wasted is not None and self._wasted.watching)

    @property
    def _is_inquiring(self) -> bool:
        return self._growth is not None and self._growth.searching

    def after_step(self, step: int, event: Batch | None) -> None:
        """Continue the searches after a step. ``event`` is the newest step that was published."""
        with self._diagnostics.contained("searching for what holds memory"):
            if self._early is not None and event is not None and event.step == step:
                found = self._early.take(event)
                if found is not None:
                    self._begin_early(*found)
            watching = self._wasted is not None and self._wasted.watching
            if self._growth is not None and not watching:
                self._growth.after_step(step, event)
            self._look_for_waste(step)
        self.follows_steps = self._early is not None or self._growth is not None or self._layers

    def take_trace(self, event: Event) -> None:
        """Keep the first two and the newest of the traced steps with exact figures."""
        if isinstance(event, Trace) and event.exact and event.step is not None:
            self._traces[2:] = [event]

    def take(self, news: GrowthNews) -> None:
        """Begin or end a search, because of a verdict on growth."""
        self._begun_search().take(news)

    def take_rise(self, name: str, rise: Rise) -> None:
        """Begin a search for the cause of a rise that the helper process has seen, if it is recent."""
        if rise.step >= self._last_step() - _RECENT:
            self._begin_early(name, rise)

    def take_rises(self, name: str, rise: Rise) -> None:
        """Begin a search for what grows at the rises that the helper process has seen, if they are recent."""
        if rise.step >= self._last_step() - _RECENT and not self.is_ending:
            self._begun_search().take_rises(name, rise)

    def helper_follows(self) -> None:
        """Leave it to the helper process to see rises."""
        self._early = None

    def end_waste(self, last_step: int | None) -> None:
        """End the search for gradients that nothing uses, and publish what it has found."""
        if self._wasted is not None:
            self.is_ending = True
            self._wasted.finish(last_step)

    def ends(self) -> None:
        """Remember that the program has ended. Memory that its functions held can have been freed."""
        self.is_ending = True
        if self._growth is not None:
            self._growth.ends()

    def finish(self) -> None:
        """End the search for what holds memory. Publish the growth if it is confirmed."""
        if self._growth is not None:
            self._growth.finish()

    def _begun_search(self) -> GrowthSearch:
        if self._growth is None:
            # Imported here: most runs never need it.
            from memlog.session.growth_search import GrowthSearch  # noqa: PLC0415

            self._growth = GrowthSearch(
                self._publish,
                self._diagnostics,
                self._is_traced,
                self._last_step,
                self._begun,
                self._traces,
            )
            self.follows_steps = True
            self.follow_steps()
            if self.is_ending:
                self._growth.ends()
        return self._growth

    def _begin_early(self, name: str, rise: Rise) -> None:
        """Begin a search for the cause of a rise, before the growth test can suspect growth."""
        if self._early_searches >= _EARLY_SEARCHES or self.is_ending:
            return
        if self._begun_search().take_early(name, rise):
            self._early_searches += 1

    def _look_for_waste(self, step: int) -> None:
        if self._wasted is not None:
            self._wasted.after_step(step, busy=self._is_inquiring or self._is_traced())
        elif self._layers:
            search = _load_waste_search()
            if search is not None:
                self._wasted = search(self._publish, self._diagnostics)


def _load_waste_search() -> type[WastedGradients] | None:
    """Return the class of the search; ``None`` if the program has not imported torch, which the class needs.

    Call this in `init`, so that no training step waits for imports.
    """
    if "torch" not in sys.modules:
        return None
    from memlog.leaks.wasted_gradients import WastedGradients  # noqa: PLC0415 - it loads parts of torch

    return WastedGradients
