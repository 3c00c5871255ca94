"""Judging of a run in its training process, after the last step, because no helper process has done it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

from memlog._internal.diagnostics import Diagnostics
from memlog.events import End, Event
from memlog.facts.judge import GrowthNews, RunJudge
from memlog.facts.run_fold import RunFold
from memlog.facts.run_verdict import RunVerdict
from memlog.facts.verdict import verdict
from memlog.journal import RunDirectory
from memlog.probes.free_memory import host_free

_SECONDS = 5.0
"""Maximum seconds for judging. The growth of a longer run is judged by commands that read the run."""


def judge_run(
    run: RunDirectory,
    rules: Sequence[str],
    publish: Callable[[Event], object],
    on_growth: Callable[[GrowthNews], object],
    diagnostics: Diagnostics,
) -> dict[str, str]:
    """Judge a run from its journal, if there is time to read it all.

    Return the alert rules about figures of this process that were never judged, each with the reason. What a
    helper process has published before is not published again.
    """
    judge = RunJudge(publish, on_growth, lambda: host_free(os.getpid()), diagnostics)
    engine = None
    if rules:
        from memlog.alerts import parse_rules  # noqa: PLC0415 - only with alert rules
        from memlog.alerts.engine import engine_for  # noqa: PLC0415 - see above

        engine = engine_for(parse_rules(rules), judge.publish, diagnostics, os.getpid())
    judge.begin(engine, list(run.events("helper")))
    deadline = time.monotonic() + _SECONDS
    for event in _own_events(run):
        judge.take(event)
        if time.monotonic() > deadline:
            return {}
    judge.finish()
    return {} if engine is None else engine.never_judged(sampled=False)


def verdict_on(run: RunDirectory, end: End) -> RunVerdict | None:
    """Return the verdict on a run from its journal; ``None`` if there was no time to read it all.

    ``end`` is the run's end, if the journal has none.
    """
    facts, deadline = RunFold(judge=False), time.monotonic() + _SECONDS
    for file in run.files():
        for entry in file.read():
            facts.take_entry(entry)
            if time.monotonic() > deadline:
                return None
    with facts.ended(end):
        return verdict(facts, facts.status(alive=False))


def _own_events(run: RunDirectory) -> Iterator[Event]:
    """Yield the events that this process has published."""
    name = f"trainer-{os.getpid()}"
    for file in run.files("trainer"):
        if file.process == name:
            for entry in file.read():
                yield entry.event
