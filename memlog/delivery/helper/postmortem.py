"""Report on a run that ended badly, with a page of the snapshot: files in the run's folder, and events."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from memlog._internal.diagnostics import Diagnostics
from memlog.artifacts.pulling import kept
from memlog.artifacts.snapshots import parse_snapshot
from memlog.bus import EventBus
from memlog.delivery.run_pages import HelpersReport, late_events
from memlog.errors import TraceNotFoundError
from memlog.events import POSTMORTEM_FILE, POSTMORTEM_KIND, Alert, Artifact, now_us
from memlog.facts.oom_cause import OUT_OF_MEMORY, UNEXPECTED_END, WORKER_KILLED
from memlog.facts.run_fold import RunFold, facts_of
from memlog.facts.run_verdict import FindingAlerts
from memlog.facts.verdict import of_memory
from memlog.journal import RunDirectory
from memlog.journal.artifacts import keep_text, open_artifact
from memlog.journal.delivery_state import HelperLock, read_states
from memlog.ranks.ends import Failure
from memlog.reports.advice import Prediction
from memlog.reports.final_state import FinalState, final_state, is_of_device
from memlog.reports.oom_diagnosis import Witness, suspect
from memlog.reports.postmortem import report
from memlog.reports.worst_step import advise_on, read_worst_step
from memlog.trace import exporters


def explain(
    run: RunDirectory,
    bus: EventBus,
    witness: Witness,
    diagnostics: Diagnostics,
    failure: Failure | None = None,
) -> str | None:
    """Publish a report and an alert about a run that is over, if the run ended badly. Return the title.

    ``witness`` holds what this process has observed about the training process. ``diagnostics`` counts the
    parts of the report that fail; the other parts are written. ``failure`` tells which ranks ended badly.
    ``failure`` is ``None`` if all ranks ended well, if their end is unknown, or if the run trained alone.
    With a ``failure``, the caller publishes the alert, which is about all ranks. If another rank failed
    first, there is no report on this rank's end, and the result is ``None``.
    """
    facts = judge_growth(run, bus, diagnostics)
    state = final_state(run)
    state.failed_with = failure
    if not _wants_explanation(state) or _is_of_another_rank(failure, state):
        return None
    return _publish(run, bus, state, witness, diagnostics, facts)


def _is_of_another_rank(failure: Failure | None, state: FinalState) -> bool:
    own = None if state.position is None else state.position.rank
    return failure is not None and failure.first is not None and failure.first.rank != own


def judge_growth(run: RunDirectory, bus: EventBus, diagnostics: Diagnostics) -> RunFold | None:
    """Publish findings about growth that lasted until a run ended without an end event.

    The findings are those that the training process would have published at a normal end. Return the facts
    about the run; ``None`` if they can't be read.
    """
    facts: RunFold | None = None
    with diagnostics.contained("judging growth a last time"):
        facts = facts_of(run)
        if facts.end is None:
            for finding in facts.at_the_end():
                facts.take(finding)
                bus.publish(finding)
    return facts


def _predicted(run: RunDirectory, state: FinalState, diagnostics: Diagnostics) -> Prediction | None:
    """Predict savings in the worst traced step; ``None`` if no step was traced."""
    prediction: Prediction | None = None
    with diagnostics.contained("predicting what would help"), suppress(TraceNotFoundError):
        event, trace = read_worst_step(run)
        if state.failure is not None and not is_of_device(event, state.failure.device):
            return None
        if state.trace is None:
            # The trainer was killed in its second step, before it could publish the first one's trace.
            state.trace = event
        predicted, standing = advise_on(run, event, trace)
        prediction = Prediction(predicted, event.step, standing)
    return prediction


def _publish(
    run: RunDirectory,
    bus: EventBus,
    state: FinalState,
    witness: Witness,
    diagnostics: Diagnostics,
    facts: RunFold | None,
) -> str:
    predicted = _predicted(run, state, diagnostics)
    if facts is not None:
        state.verdict = of_memory(facts, facts.status(alive=False))
        longest = facts.longest_batch
        state.longest = None if longest is None else longest.text
    written = report(state, witness, predicted, diagnostics)
    if SNAPSHOT in state.files:
        with diagnostics.contained("drawing the allocator's snapshot"):
            page = keep_page(run)
            if page is not None:
                bus.publish(page)
    bus.publish(keep_text(run, written.text, POSTMORTEM_FILE, POSTMORTEM_KIND))
    if state.failed_with is None:
        bus.publish(
            Alert(
                time_us=now_us(),
                step=state.last_step,
                level="error",
                rule=_rule(state, witness),
                title=written.title,
                text=f"{state.grew} {POSTMORTEM_FILE} explains it"
                if state.grew
                else f"{POSTMORTEM_FILE} explains it",
            )
        )
    return written.title


def _rule(state: FinalState, witness: Witness) -> str:
    if suspect(state, witness).level in {"certain", "likely"}:
        return OUT_OF_MEMORY
    return UNEXPECTED_END if state.failure is None else WORKER_KILLED


def explain_afterwards(
    run: RunDirectory,
    writer: Literal["helper", "sync"] = "sync",
    diagnostics: Diagnostics | None = None,
    failure: Failure | None = None,
) -> bool:
    """Publish the report on a bad end if the helper process died with the trainer, as in a killed container.

    If the helper process still lives, it writes the report itself. Errors are logged, and delivery continues.
    ``failure``: see `explain`. Return False if another process still works for the run, or the run goes on.
    """
    end = run.end()  # a cheap check before the whole journal is read
    if end is not None and end.status == "finished":
        return True
    if run.trainer() is None or (end is None and run.is_alive()):
        return False
    if any(state.ended and state.ended.status == "finished" for state in read_states(run)):
        return True  # the journal lacks the end, for example because its disk was full
    diagnostics = diagnostics or Diagnostics()
    with (
        diagnostics.contained("explaining how the run ended"),
        HelperLock(run) as is_free,
    ):
        if not is_free:
            return False
        if not _wants_explanation(final_state(run)):
            return True
        with late_events(run, diagnostics) as bus:
            bus.subscribe(FindingAlerts(bus.publish))
            explain(run, bus, Witness(writer), diagnostics, failure)
            if writer == "sync":
                HelpersReport(run, bus.publish, diagnostics).publish()
    return True


def _wants_explanation(state: FinalState) -> bool:
    """Return True if a run ended badly (no end event, or out of memory) and has no report yet.

    If the run continued after a failed allocation, the run did not end badly.
    """
    if state.reported:
        return False
    if state.end is None:
        return True
    return state.failure is not None and state.end.status != "finished"


SNAPSHOT = "out-of-memory.pickle"
"""Name of the snapshot that memlog saves at a failed allocation."""
KIND = "snapshot"
PAGE = "out-of-memory.html"
_MAX_BYTES = 256 * 1024**2
_INTRO = (
    "Each bar is a frame of the stack that allocated memory, as wide as the bytes that were in use when the "
    "snapshot was taken."
)


def keep_page(run: RunDirectory) -> Artifact | None:
    """Write a page of the memory in use in the snapshot.

    Returns:
        The event that describes the page; ``None`` if the snapshot is missing or too large.

    Raises:
        SnapshotError: The snapshot is damaged, or holds no allocation.
        OSError: The page can't be written.
    """
    snapshot = next((file for file in kept(run)[::-1] if file.name == SNAPSHOT), None)
    file = None if snapshot is None else open_artifact(run, snapshot)
    if file is None:
        return None
    with file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        return None
    graph = exporters.snapshot_graph(parse_snapshot(content, SNAPSHOT), SNAPSHOT)
    page = exporters.flame_page(graph.document, intro=_INTRO, holder="innermost frame")
    return None if page is None else keep_text(run, page, PAGE, KIND)
