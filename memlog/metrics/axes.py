"""Axis and index of an event, and conversion of the session's step numbers to those of a tracker's run."""

from __future__ import annotations

import re

import msgspec

from memlog.events import (
    Alert,
    Artifact,
    Batch,
    Epoch,
    Evaluation,
    Event,
    Health,
    Loss,
    OutOfMemory,
    Phase,
    PinnedMemory,
    Ranks,
    Recorded,
    Sample,
    Scope,
    Trace,
)
from memlog.sink import Axis

_ON_STEPS = (
    Batch,
    Loss,
    Sample,
    PinnedMemory,
    Health,
    Alert,
    Trace,
    Scope,
    Recorded,
    Phase,
    Ranks,
)
_STEP_IN_TEXT = re.compile(r"\bsteps? [0-9]")


def axis_and_index(event: Event) -> tuple[Axis, int] | None:
    """Return the event's axis and its index on that axis; ``None`` if the event lies on no axis."""
    if isinstance(event, _ON_STEPS) and event.step is not None:
        return "step", event.step
    if isinstance(event, (Evaluation, Alert)) and event.evaluation is not None:
        return "evaluation", event.evaluation
    if isinstance(event, (Epoch, Alert)) and event.epoch is not None:
        return "epoch", event.epoch
    return None


def is_content(event: Event) -> bool:
    """Return True for an event on an axis, an alert, a failed allocation, or a file of the user's.

    A tracker's run with none of them has nothing to show.
    """
    if isinstance(event, Artifact):
        return not event.is_report
    return isinstance(event, (Alert, OutOfMemory)) or axis_and_index(event) is not None


def in_run(event: Event, offset: int) -> Event | None:
    """Return an event with the step number of a tracker's run instead of the session's.

    ``offset`` is the session's step minus the run's step (`memlog.journal.Binding.offset`). Before the run's
    first step, the result is ``None`` for a batch or a loss. A phase gets step 0. Other events get no step.
    """
    step = getattr(event, "step", None)
    if not offset or step is None:
        return event
    if isinstance(event, Alert):
        return alert_in_run(event, offset)
    own = step - offset
    if own >= 0 or isinstance(event, Phase):
        return msgspec.structs.replace(event, step=max(own, 0))
    return None if isinstance(event, (Batch, Loss)) else msgspec.structs.replace(event, step=None)


def alert_in_run(alert: Alert, offset: int) -> Alert:
    """Return an alert with the step number of a tracker's run. The arguments are those of `in_run`.

    Steps in the title and in the text keep the session's numbers. If the title or the text names a step, a
    remark at the end of the text explains the numbers.
    """
    if not offset:
        return alert
    step = None if alert.step is None or alert.step < offset else alert.step - offset
    text = alert.text
    if _STEP_IN_TEXT.search(f"{alert.title} {text}"):
        how = f"subtract {offset:,}" if offset > 0 else f"add {-offset:,}"
        text += f" (Steps in this text are the session's: {how} to get this run's step.)"
    return msgspec.structs.replace(alert, step=step, text=text.strip())
