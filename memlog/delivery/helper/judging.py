"""Judging of a run in its helper process, from the training process's journal and the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.delivery.helper.protocol import JUDGED_HERE, RUNNING, Begin, writer_for
from memlog.events import Alert, Batch, ChildReading, End, Event, Finding, Reading, Sample
from memlog.facts.judge import RunJudge
from memlog.facts.rises import EarlyRises, RepeatedRises
from memlog.facts.run_verdict import FindingAlerts, RunVerdict
from memlog.journal import RunDirectory
from memlog.probes.machine import host_free


class Rules(Protocol):
    """Alert rules of a run. They judge each event by its readings ``found``."""

    def __call__(self, event: Event, found: list[Reading]) -> None: ...
    def never_judged(self, *, sampled: bool) -> dict[str, str]:
        """Return the rules that were never judged, each with the reason.

        With ``sampled``, return the rules about figures that the helper process samples, otherwise the
        others.
        """

    def finish(self) -> None:
        """Publish the alerts that wait for a collection of garbage."""


RulesMaker: TypeAlias = Callable[
    [Begin, Callable[[Event], object], Callable[[], object], Diagnostics], Rules | None
]
"""Function that makes the rules of a run from its first message, a function that publishes their alerts, and
one that asks the training process to collect garbage."""


class HelperJudge:
    """Judge of one run, in the helper process. No method raises.

    ``sends_at_once`` sends an alert to the training process through a pipe, if the pipe is for such alerts.
    If it returns False, the alert is sent as a request.
    """

    def __init__(
        self,
        begin: Begin,
        bus: EventBus,
        diagnostics: Diagnostics,
        make_rules: RulesMaker,
        sends_at_once: Callable[[Alert], bool],
    ) -> None:
        self._bus = bus
        self._diagnostics = diagnostics
        self._sends_at_once = sends_at_once
        self._requests = writer_for(begin.requests_fd)
        run = RunDirectory(Path(begin.run_directory))
        earlier = [*run.events("helper")] if begin.again else []
        self._judge = RunJudge(
            self._publish,
            lambda news: self._requests.write("growth", news),
            lambda: host_free(begin.trainer_pid),
            diagnostics,
        )
        self._rules = make_rules(
            begin, self._judge.publish, lambda: self._requests.write("collect"), diagnostics
        )
        self._judge.begin(self._rules, earlier)
        bus.subscribe(self._judge.take, Sample)
        bus.subscribe(self.note, Alert, End, Finding)
        bus.subscribe(self._found, Finding)
        self._other_alerts = FindingAlerts(bus.publish)
        self._is_publishing = self._follows = False
        self._early = EarlyRises()
        self._repeated = RepeatedRises()
        self._answered = RUNNING
        self._told: RunVerdict | None = None

    def take(self, event: Event) -> None:
        """Take the next event of the training process's journal."""
        self._judge.take(event)
        rise = self._early.take(event) if type(event) is Batch else None
        if rise is not None:
            self._requests.write("early", rise)
        rises = self._repeated.take(event) if type(event) is Batch else None
        if rises is not None:
            self._requests.write("rises", rises)

    def note(self, event: Event) -> None:
        """Note what a helper process has published about the run. It is a fact for the verdict."""
        self._judge.facts.take(event)

    def take_children(self, step: int, children: Sequence[ChildReading]) -> None:
        """Take readings of child processes that are in no sample."""
        self._judge.take_children(step, children)

    def look(self) -> None:
        """Tell the training process that its events are judged as they come. Send what waits.

        Call it when all events in the journal are taken.
        """
        with self._diagnostics.contained("judging the run"):
            if not self._follows:
                self._follows = True
                self._requests.write("following")
            self._requests.flush()

    @property
    def asked(self) -> int | None:
        """Number of the judgement for which the training process waits; ``None``: it does not wait."""
        state = self._requests.state
        return state if state > self._answered else None

    def finish(self, asked: int | None = None) -> dict[str, str]:
        """Judge the steps so far, as if the run ended now. More steps may follow.

        ``asked`` is the number of the judgement, if the training process waits for it. Return the rules about
        samples that were never judged, with the reasons. The training process reports the others.
        """
        unjudged: dict[str, str] = {}
        with self._diagnostics.contained("judging the run a last time"):
            others: dict[str, str] = {}
            if self._rules is not None:
                self._rules.finish()
                unjudged = self._rules.never_judged(sampled=True)
                others = self._rules.never_judged(sampled=False)
            self._judge.finish()
            if asked is not None:
                self._answered = asked
                self._requests.write("judged", (asked, others))
        return unjudged

    def tell_verdict(self) -> None:
        """Tell the training process the verdict on the whole run, if its end is known. Tell only news."""
        with self._diagnostics.contained("telling the verdict"):
            if self._judge.facts.end is not None and (told := self._judge.verdict) != self._told:
                self._told = told
                self._requests.write("verdict", told)

    def _publish(self, event: Event) -> None:
        if self._requests.state == JUDGED_HERE:
            return  # the training process has published this
        self._is_publishing = True
        self._bus.publish(event)
        self._is_publishing = False
        if isinstance(event, Alert) and not self._sends_at_once(event):
            self._requests.write("alert", event)

    def _found(self, event: Event) -> None:
        """Publish an alert about a finding on a run that has ended. The judge does so for its own."""
        if not self._is_publishing:
            self._other_alerts(event)
