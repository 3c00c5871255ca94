"""Read the worst traced step with all its events from the run's folder, where the tracer saves it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from memlog._internal.safe_files import read_plain
from memlog.errors import TraceNotFoundError
from memlog.events import Trace
from memlog.journal import RunDirectory
from memlog.journal.format import UNDECODABLE
from memlog.trace import encoding
from memlog.trace.records import RecordedTrace
from memlog.trace.storage_uses import HALF_BY_SLOW_CONVOLUTION

MAX_TRACE_BYTES = 256 * 1024**2
_LARGEST = 2**62
"""Maximum bytes of a storage. A trace with a larger storage counts as damaged: no real storage is as big."""
_WITH_TYPE = (encoding.FREE, encoding.USES)
"""Kinds of events whose ``phase`` is the type of a storage (`memlog.trace.storage_uses`)."""
_TYPES = HALF_BY_SLOW_CONVOLUTION + 1


class WorstStep(NamedTuple):
    """Worst traced step, as the tracer saved it."""

    event: Trace
    """The event that was published about the step."""
    trace: RecordedTrace


def read_worst_step(run: RunDirectory) -> WorstStep:
    """Return the traced step that needed most memory.

    Raises:
        TraceNotFoundError: No step was traced, or the file with the worst traced step can't be read.
    """
    try:
        kept = read_plain(run.path, run.worst_step.name, MAX_TRACE_BYTES)
        event, trace = msgspec.msgpack.decode(kept, type=tuple[Trace, RecordedTrace])
    except FileNotFoundError:
        raise TraceNotFoundError(
            f"no step of run {run.id} was traced: train with memlog.init(model=model, layers=True), or with "
            "`memlog run --layers`"
        ) from None
    except (OSError, *UNDECODABLE) as error:
        raise _unreadable(run, str(error)) from error
    if not _is_sound(trace):
        raise _unreadable(run, "its events are damaged")
    return WorstStep(event, trace)


def _unreadable(run: RunDirectory, why: str) -> TraceNotFoundError:
    return TraceNotFoundError(
        f"the traced step of run {run.id} can't be read ({why}): trace it again"
    )


def _is_sound(trace: RecordedTrace) -> bool:
    """Return True if all numbers of the events are in range. The file is untrusted."""
    if len(trace.events) % encoding.EVENT_BYTES or not trace.paths:
        return False
    return all(
        event.kind <= encoding.LINE
        and event.layer < len(trace.paths)
        and event.phase < (_TYPES if event.kind in _WITH_TYPE else len(encoding.PHASES))
        and event.category < len(encoding.CATEGORIES)
        and (event.kind != encoding.ALLOC or 0 <= event.size <= _LARGEST)
        and (event.kind != encoding.LINE or 0 < event.size <= len(trace.lines))
        for event in encoding.decode(trace.events)
    )
