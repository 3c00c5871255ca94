"""Writing the report of a run that ended badly into its folder and journal, for every tracker."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.errors import TraceNotFoundError
from memlog.events import Alert, End, now_us
from memlog.journal import Binding, JournalWriter, Position, RunDirectory
from memlog.journal.artifacts import keep
from memlog.journal.delivery_state import HelperLock
from memlog.reports.advice import Prediction
from memlog.reports.final_state import REPORT, LastMoments, last_moments
from memlog.reports.oom_diagnosis import Witness, suspect
from memlog.reports.postmortem import report
from memlog.reports.step_ranking import advise_on
from memlog.reports.worst_step import read_worst_step

FILE = "postmortem.md"
OUT_OF_MEMORY = "out of memory"
WITHOUT_A_WORD = "ended without a word"
WORKER_KILLED = "worker killed"
"""The alerts' rules."""


def explain(run: RunDirectory, bus: EventBus, witness: Witness, diagnostics: Diagnostics) -> None:
    """Publishes an alert and a file that explain a run that is over, where it ended badly.

    Args:
        run: The run; nobody of the trainer's writes to it any more.
        bus: Takes the two events.
        witness: What was seen from outside.
        diagnostics: Counts what can't be told; the rest is.
    """
    moments = last_moments(run)
    if _wants_explanation(moments):
        _publish(run, bus, moments, witness, diagnostics)


def _predicted(
    run: RunDirectory, moments: LastMoments, diagnostics: Diagnostics
) -> Prediction | None:
    """What would make the worst traced step smaller; ``None`` where none was traced."""
    found: Prediction | None = None
    with diagnostics.contained("predicting what would help"), suppress(TraceNotFoundError):
        event, trace = read_worst_step(run)
        if moments.trace is None:
            # The trainer was killed before the next step told it that the first was a whole iteration.
            moments.trace = event
        predicted, standing = advise_on(run, event, trace)
        found = Prediction(predicted, event.step, standing)
    return found


def _publish(
    run: RunDirectory,
    bus: EventBus,
    moments: LastMoments,
    witness: Witness,
    diagnostics: Diagnostics,
) -> None:
    predicted = _predicted(run, moments, diagnostics)
    written = report(moments, witness, predicted, diagnostics)
    with TemporaryDirectory() as folder:
        source = Path(folder) / FILE
        source.write_text(written.text, encoding="utf-8")
        bus.publish(keep(run, source, FILE, REPORT))
    bus.publish(
        Alert(
            time_us=now_us(),
            step=moments.last_step,
            level="error",
            rule=_rule(moments, witness),
            title=written.title,
            text=f"{FILE} explains it",
        )
    )


def _rule(moments: LastMoments, witness: Witness) -> str:
    if suspect(moments, witness).level in {"certain", "likely"}:
        return OUT_OF_MEMORY
    return WITHOUT_A_WORD if moments.failure is None else WORKER_KILLED


def explain_afterwards(run: RunDirectory) -> None:
    """The same where memlog's helper process died with the trainer, as in a container that is killed.

    A helper that lives says itself what there is to say. A report that can't be written is no reason to
    deliver nothing: that is logged.
    """
    if run.is_alive() or not _may_have_ended_badly(run):
        return
    diagnostics = Diagnostics()
    with (
        diagnostics.contained("explaining how the run ended"),
        HelperLock(run) as nobody_is_at_work,
    ):
        if not nobody_is_at_work:
            return
        moments = last_moments(run)
        if not _wants_explanation(moments):
            return
        header = run.trainer()
        journal = JournalWriter(
            run.path,
            run=run.id,
            role="helper",
            begun_us=header.begun_us if header else now_us(),
            initial_step=header.initial_step if header else 0,
            diagnostics=diagnostics,
        )
        for backend, binding in _last_bindings(run).items():
            journal.bind(backend, binding)
        bus = EventBus(diagnostics)
        bus.subscribe(journal.append)
        _publish(run, bus, moments, Witness("sync"), diagnostics)
        journal.close()


def _may_have_ended_badly(run: RunDirectory) -> bool:
    """Looks at the trainer's last segment alone, and at whether a helper has lived to report."""
    for file in run.files():
        if file.process.startswith("trainer"):
            last = max(file.segments, default=1)
            ends = [
                entry.event
                for entry in file.read(Position(last, 0))
                if isinstance(entry.event, End)
            ]
            return not ends or ends[-1].status != "finished"
    return False


def _last_bindings(run: RunDirectory) -> dict[str, Binding]:
    """The trackers' runs that the trainer's last events belong to."""
    bindings: dict[str, Binding] = {}
    for file in run.files():
        if file.process.startswith("trainer"):
            for header in file.headers():
                bindings = header.bindings
    return bindings


def _wants_explanation(moments: LastMoments) -> bool:
    """Ended without a word, or for want of memory, and nobody has said so yet.

    A failed allocation that was survived is no bad end.
    """
    if moments.reported:
        return False
    if moments.end is None:
        return True
    return moments.failure is not None and moments.end.status != "finished"
