"""Report on a run that ended badly: a file in the run's folder, and events for every tracker."""

from __future__ import annotations

from contextlib import suppress

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.delivery.helper import snapshot_page
from memlog.delivery.helper.training_news import UNEXPECTED_END
from memlog.delivery.run_report import HelpersReport, late_events
from memlog.errors import TraceNotFoundError
from memlog.events import Alert, now_us
from memlog.journal import RunDirectory
from memlog.journal.artifacts import keep_text
from memlog.journal.delivery_state import HelperLock
from memlog.ranks.ends import Failure
from memlog.reports.advice import Prediction
from memlog.reports.final_state import REPORT, FinalState, final_state
from memlog.reports.oom_diagnosis import Witness, suspect
from memlog.reports.postmortem import report
from memlog.reports.step_ranking import advise_on
from memlog.reports.worst_step import read_worst_step

FILE = "postmortem.md"
OUT_OF_MEMORY = "out of memory"
WORKER_KILLED = "worker killed"
"""Value of `Alert.rule` if a worker process was killed."""


def explain(
    run: RunDirectory,
    bus: EventBus,
    witness: Witness,
    diagnostics: Diagnostics,
    failure: Failure | None = None,
) -> None:
    """Publish a report and an alert about a run that is over, if the run ended badly.

    ``witness`` holds what this process has observed about the training process. ``diagnostics`` counts the
    parts of the report that fail; the other parts are written. ``failure`` tells which ranks ended badly.
    ``failure`` is ``None`` if all ranks ended well, if their end is unknown, or if the run trained alone.
    """
    state = final_state(run)
    state.failed_with = failure
    if _wants_explanation(state):
        _publish(run, bus, state, witness, diagnostics)


def _predicted(run: RunDirectory, state: FinalState, diagnostics: Diagnostics) -> Prediction | None:
    """Predict savings in the worst traced step; ``None`` if no step was traced."""
    found: Prediction | None = None
    with diagnostics.contained("predicting what would help"), suppress(TraceNotFoundError):
        event, trace = read_worst_step(run)
        if state.trace is None:
            # The trainer was killed in its second step, before it could publish the first one's trace.
            state.trace = event
        predicted, standing = advise_on(run, event, trace)
        found = Prediction(predicted, event.step, standing)
    return found


def _publish(
    run: RunDirectory,
    bus: EventBus,
    state: FinalState,
    witness: Witness,
    diagnostics: Diagnostics,
) -> None:
    predicted = _predicted(run, state, diagnostics)
    written = report(state, witness, predicted, diagnostics)
    if snapshot_page.SNAPSHOT in state.files:
        with diagnostics.contained("drawing the allocator's snapshot"):
            page = snapshot_page.keep_page(run)
            if page is not None:
                bus.publish(page)
    bus.publish(keep_text(run, written.text, FILE, REPORT))
    bus.publish(
        Alert(
            time_us=now_us(),
            step=state.last_step,
            level="error",
            rule=_rule(state, witness),
            title=written.title,
            text=f"{FILE} explains it",
        )
    )


def _rule(state: FinalState, witness: Witness) -> str:
    if suspect(state, witness).level in {"certain", "likely"}:
        return OUT_OF_MEMORY
    return UNEXPECTED_END if state.failure is None else WORKER_KILLED


def explain_afterwards(run: RunDirectory) -> None:
    """Publish the report on a bad end if the helper process died with the trainer, as in a killed container.

    If the helper process still lives, it writes the report itself. Errors are logged, and delivery continues.
    """
    if run.trainer() is None or run.is_alive():
        return
    end = run.end()  # a cheap check before the whole journal is read
    if end is not None and end.status == "finished":
        return
    diagnostics = Diagnostics()
    with (
        diagnostics.contained("explaining how the run ended"),
        HelperLock(run) as is_free,
    ):
        if not is_free:
            return
        state = final_state(run)
        if not _wants_explanation(state):
            return
        with late_events(run, diagnostics) as bus:
            _publish(run, bus, state, Witness("sync"), diagnostics)
            HelpersReport(run, bus.publish, diagnostics).publish()


def _wants_explanation(state: FinalState) -> bool:
    """Return True if a run ended badly (no end event, or out of memory) and has no report yet.

    If the run continued after a failed allocation, the run did not end badly.
    """
    if state.reported:
        return False
    if state.end is None:
        return True
    return state.failure is not None and state.end.status != "finished"
