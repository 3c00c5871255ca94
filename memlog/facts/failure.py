"""First line about a run that ran out of memory. All reports begin with it."""

from __future__ import annotations

import re

from memlog.events import Alert, Batch, End, Event, OutOfMemory
from memlog.facts.oom_cause import NOTHING_BEFORE, Background, cause_of
from memlog.findings import after_step, failure_title

OUT_OF_MEMORY = "out of memory"
WORKER_KILLED = "worker killed"
UNEXPECTED_END = "ended unexpectedly"
"""Values of `Alert.rule` in the alert about the report on a run's bad end."""
OF_ENDS = frozenset({OUT_OF_MEMORY, WORKER_KILLED, UNEXPECTED_END})
"""All values of `Alert.rule` in alerts about the report on a run's bad end."""
_OF_INFERENCE = (None, "forward")
"""Values of `OutOfMemory.phase` of failures that may be outside training, if nothing recorded a graph."""
_OF_ANOTHER_RANK = re.compile(r"rank \d+: ")


def title_with_cause(
    failure: OutOfMemory, last_step: int | None, before: Background = NOTHING_BEFORE
) -> str:
    """Return `failure_title`, followed by the cause if it is known.

    ``before`` describes the memory before the failure.
    """
    if failure.caught:
        return (
            f"Ended with another error {after_step(last_step)} ({failure.raised_as}); before, an allocation "
            f"on {failure.device} had failed, and the program had caught that"
        )
    # If the allocation failed in another thread than the training, steps may have followed.
    failed_after = last_step if failure.state is None else failure.step
    title, cause = failure_title(failure, failed_after), cause_of(failure, before)
    return title if cause is None else f"{title}: {cause.clause}"


def has_gone_on(failure: OutOfMemory, event: Event) -> bool:
    """Return True if a later event shows that the program went on after it had caught a failed allocation.

    A completed step shows it. After a forward pass without gradients, such as an evaluation with a smaller
    batch, there may be no further step. Then a good end of the run shows it.
    """
    if isinstance(event, Batch):
        return True
    is_of_training = failure.gradients is not False or failure.phase not in _OF_INFERENCE
    if failure.step is None or is_of_training:
        return False
    return isinstance(event, End) and event.status == "finished"


def is_title(alert: Alert) -> bool:
    """Return True if an alert's title is the title of the report on this run's own bad end."""
    # An older memlog copied the alerts of other ranks.
    return alert.rule in OF_ENDS and _OF_ANOTHER_RANK.match(alert.title) is None
