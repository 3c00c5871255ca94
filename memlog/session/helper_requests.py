"""What the helper process asks the training process to do, and the verdict at the end of a run.

Growth, alert rules and the allocator's retries are judged in the helper process. A few things must happen in
the training process: the search for what holds memory, a collection of garbage, calls of ``on_alert``,
printed lines. The helper process asks for them (`memlog.delivery.helper.protocol`), and a step looks for
requests.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.bus import EventBus
from memlog.delivery.helper.protocol import JUDGED_HERE, RUNNING, Request, RequestReader
from memlog.events import Alert, Batch, End, Event, Finding, HeapReading, Trace, now_us
from memlog.facts.rises import EarlyRises, Rise
from memlog.facts.run_verdict import RunVerdict, is_known, new_alert
from memlog.journal import RunDirectory
from memlog.probes.process import collect_garbage, read_heap

if TYPE_CHECKING:
    from memlog.console import Console
    from memlog.delivery.helper.protocol import AlertListener
    from memlog.facts.judge import GrowthNews
    from memlog.leaks.wasted_gradients import WastedGradients
    from memlog.session.growth_search import GrowthSearch

_MAX_RULES = 5
"""Maximum number of rules that a printed line names."""
_ANSWERS_WITHIN = 1.0
"""Maximum seconds to wait for the helper's judgement. After that, the run is judged here."""
_POLL = 0.005


class HelperRequests:
    """Handler of the helper's requests. No method raises an error of memlog's.

    Args:
        bus: Bus of this process.
        diagnostics: Counts of errors.
        rules: Texts of the alert rules.
        console: Printer of alerts; ``None``: alerts of rules are not printed.
        on_alert: Function called with each alert. It must not raise exceptions of memlog's.
        is_traced, last_step, layers: See `StepSearches`.

    Attributes:
        searches: The searches for which the helper process asks.
        reader: Memory of the requests; ``None`` if it could not be made.
        has_found: True if something was found in the run.
    """

    def __init__(
        self,
        bus: EventBus,
        diagnostics: Diagnostics,
        rules: Sequence[str],
        console: Console | None,
        on_alert: Callable[[Alert], object],
        is_traced: Callable[[], bool],
        last_step: Callable[[], int],
        *,
        layers: bool,
    ) -> None:
        self._bus = bus
        self._diagnostics = diagnostics
        self._rules = rules
        self._console = console
        self._on_alert = on_alert
        self._last_step = last_step
        self.searches = StepSearches(bus.publish, diagnostics, is_traced, last_step, layers=layers)
        self._lock = threading.RLock()
        self._waiting: deque[Request] = deque()
        self._is_judging = False
        self._unjudged: dict[str, str] = {}
        """Alert rules about figures of this process that were never judged, each with the reason."""
        self._verdict: RunVerdict | None = None
        self._asked = self._answered = 0
        """Numbers of the newest judgement for which the helper was asked, and of the newest that came."""
        self._unprinted: deque[Alert] = deque()
        self._findings: list[Finding] = []
        self.has_found = False
        self.reader: RequestReader | None = None
        with diagnostics.contained("sharing memory with the helper process"):
            self.reader = RequestReader(self.take)
        bus.subscribe(self._found, Finding)
        bus.subscribe(self.searches.take_trace, Trace)

    @property
    def follows_steps(self) -> bool:
        """True if `after_step` has work to do at each step."""
        return self.searches.follows_steps or bool(self._unprinted)

    def take(self) -> None:
        """Handle the requests that have come. Another thread that handles requests goes on alone."""
        if self.reader is None or not self._lock.acquire(blocking=False):
            return
        try:
            with self._diagnostics.contained("reading the helper's requests"):
                self._waiting.extend(self.reader.read())
            while self._waiting:
                with self._diagnostics.contained("a request of the helper process"):
                    self._handle(self._waiting.popleft())
        finally:
            self._lock.release()

    def after_step(self, step: int, event: Batch | None) -> None:
        """Print what waits for a step, and continue the searches. For the arguments, see `StepSearches`."""
        while self._unprinted:
            self._print(self._unprinted.popleft())
        self.searches.after_step(step, event)

    def settle(self, until: float, ask: Callable[[], bool]) -> None:
        """Get the judgement on the steps so far, and publish the confirmed findings. More steps may follow.

        ``until`` is the time at which to stop waiting, as `time.monotonic` returns it. ``ask``: see `finish`.
        The findings are printed after the next step, because the run's last lines tell the main one.
        """
        self._end_steps(max(until - time.monotonic(), 0.0), ask, None)
        self.searches.is_ending = False
        if self._unprinted:
            self.searches.follow_steps()

    def finish(
        self,
        last_step: int | None,
        timeout: float,
        ask: Callable[[], bool],
        run: RunDirectory,
    ) -> None:
        """Get the judgement on the whole run, and publish the confirmed findings.

        ``ask`` asks the helper process for the judgement. It returns False if no helper process can answer.
        If it does not answer within ``timeout`` seconds, this process judges the run.
        """
        self.searches.end_waste(last_step)
        self._end_steps(min(timeout, _ANSWERS_WITHIN), ask, run)

    def _end_steps(self, timeout: float, ask: Callable[[], bool], run: RunDirectory | None) -> None:
        """Get a judgement. Judge ``run`` here if no helper process does, unless ``run`` is ``None``."""
        with self._diagnostics.contained("judging the run a last time"):
            self.searches.ends()
            self._wait_for_judgement(timeout, ask)
            if self._answered != self._asked and run is not None:
                self._judge_here(run)
        with self._diagnostics.contained("publishing what holds memory"):
            self.searches.finish()

    def listener(self) -> AlertListener | None:
        """Return a receiver of alerts about what the helper process samples; ``None``: no rule is about that.

        These alerts come on a thread of their own, because they don't depend on steps.

        Raises:
            OSError: No pipe can be created.
        """
        if not self._sampled_rules():
            return None
        from memlog.delivery.helper.protocol import AlertListener  # noqa: PLC0415 - see above

        return AlertListener(self._tell, self._diagnostics)

    def close(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def print_unjudged_rules(self, helper_is_away: bool) -> dict[str, str]:
        """Print the rules that were not judged, and why. Return the reasons by the text of the rule.

        ``helper_is_away`` is True if the helper process ended too early.
        """
        rules: dict[str, str] = {}
        with self._diagnostics.contained("looking for rules that were never judged"):
            rules = dict(self._unjudged)
            if rules:
                shown = _listed([f"{rule!r} ({why})" for rule, why in rules.items()])
                say(f"alert rules never judged in this run: {shown}")
            sampled = self._sampled_rules() if helper_is_away else []
            if sampled:
                shown = _listed([repr(rule) for rule in sampled])
                say(f"alert rules no longer judged since the helper process ended: {shown}")
                why = "no longer, since the helper process ended"
                rules |= dict.fromkeys(sampled, why)
        return rules

    def _sampled_rules(self) -> list[str]:
        from memlog.alerts import parse_rules  # noqa: PLC0415 - only with alert rules

        return [rule.text for rule in parse_rules(self._rules) if rule.sampled]

    def verdict(self, run: RunDirectory, end: End) -> RunVerdict | None:
        """Return the verdict on the whole run, by this process if the helper process has not told it.

        ``None``: there was no time to read the run.
        """
        self.take()
        if self._verdict is None:
            # Imported here: only needed without a helper process.
            from memlog.session.growth_search import verdict_on  # noqa: PLC0415

            self._verdict = verdict_on(run, end)
        return self._verdict

    def _found(self, event: Event) -> None:
        """Publish and print an alert about a finding of this process."""
        if isinstance(event, Finding) and not self._is_judging:
            known = any(is_known(event, before) for before in self._findings)
            self._findings.append(event)
            if not known:
                alert = new_alert(event)
                self._bus.publish(alert)
                self._tell(alert)

    def _tell(self, alert: Alert) -> None:
        """Print an alert, and call the user's function."""
        self.has_found = self.has_found or alert.is_of_finding
        if (
            alert.is_of_finding and self.searches.is_ending
        ):  # at the end, the main finding is printed
            self._unprinted.append(alert)
        else:
            self._print(alert)
        self._on_alert(alert)

    def _print(self, alert: Alert) -> None:
        with self._diagnostics.contained("printing"):
            if alert.is_of_finding:
                say(f"{alert.title} {alert.text}" if alert.text else alert.title)
            elif self._console is not None:
                self._console(alert)

    def _handle(self, request: Request) -> None:
        kind, body = request.kind, request.body
        if kind == "growth":
            from memlog.facts.judge import GrowthNews  # noqa: PLC0415 - see above

            self.searches.take(msgspec.json.decode(body, type=GrowthNews))
        elif kind == "alert":
            self._tell(msgspec.json.decode(body, type=Alert))
        elif kind == "collect":
            self._collect_garbage()
        elif kind == "early":
            self.searches.take_rise(*msgspec.json.decode(body, type=tuple[str, Rise]))
        elif kind == "rises":
            self.searches.take_rises(*msgspec.json.decode(body, type=tuple[str, Rise]))
        elif kind == "following":
            self.searches.helper_follows()
        elif kind == "judged":
            decoded = msgspec.json.decode(body, type=tuple[int, dict[str, str]])
            self._answered, self._unjudged = decoded
        elif kind == "verdict":
            self._verdict = msgspec.json.decode(body, type=RunVerdict)

    def _collect_garbage(self) -> None:
        collection, heap = collect_garbage(), read_heap()
        if collection is not None and heap is not None:
            self._bus.publish(
                HeapReading(
                    now_us(), self._last_step(), collection.left, heap.idle, collection.freed
                )
            )

    def _wait_for_judgement(self, timeout: float, ask: Callable[[], bool]) -> None:
        self._asked += 1
        if self.reader is None:
            return
        self.reader.tell(self._asked)
        deadline = time.monotonic() + timeout
        if timeout and ask():
            while self._answered != self._asked and time.monotonic() < deadline:
                if self.reader.pending:
                    self.take()
                else:
                    time.sleep(_POLL)
        self.reader.tell(RUNNING)

    def _judge_here(self, run: RunDirectory) -> None:
        """Judge the run from its journal, because no helper process has done it."""
        if self.reader is not None:
            self.reader.tell(JUDGED_HERE)
            self.take()
        # Imported here: only needed without a helper process.
        from memlog.session.growth_search import judge_run  # noqa: PLC0415

        def publish(event: Event) -> None:
            self._is_judging = True
            self._bus.publish(event)
            self._is_judging = False
            if isinstance(event, Alert):
                self._tell(event)

        self._unjudged = judge_run(
            run,
            self._rules,
            publish,
            self.searches.take,
            self._diagnostics,
        )


def _listed(rules: Sequence[str]) -> str:
    more = f"; and {len(rules) - _MAX_RULES} more" if len(rules) > _MAX_RULES else ""
    return "; ".join(rules[:_MAX_RULES]) + more


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
                risen = self._early.take(event)
                if risen is not None:
                    self._begin_early(*risen)
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
    try:
        from memlog.leaks.wasted_gradients import WastedGradients  # noqa: PLC0415 - it loads parts of torch
    except (ImportError, AttributeError):
        return None  # this torch lacks a private part, as the tracer has said

    return WastedGradients
