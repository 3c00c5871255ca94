"""Summarize a run from its journal and from the saved states of its uploaders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from operator import attrgetter
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from memlog._internal.redact import bare_address, without_credentials
from memlog._internal.safe_files import read_plain, replacing
from memlog._version import __version__
from memlog.events import CUT, Alert, Artifact, End, Finding, StepInputs
from memlog.facts.later_memory import saving_costs
from memlog.facts.verdict import verdict
from memlog.findings import failure_place
from memlog.journal import Binding, JournalFile, RunDirectory
from memlog.journal.delivery_state import InProcessState, UploadState, all_states
from memlog.journal.format import UNDECODABLE
from memlog.reports.accumulator import Accumulator
from memlog.reports.schema import (
    AlertFacts,
    ArtifactFacts,
    Delivery,
    DeviceFacts,
    FailedRank,
    FindingFacts,
    Forecast,
    HealthFacts,
    InputFacts,
    LargestStep,
    RunFacts,
    Summary,
    TracedFacts,
    TrackedRun,
)
from memlog.sink import LOCAL

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NOTHING_YET = Delivery(points=0, stage="waiting", problem=None, runs=[])

_COUNTED_BY_THE_WRITER = ("journal_write", "journal_gone", "journal_queue_full")
"""Reasons for missing events that the process which published the events has counted itself."""

_T = TypeVar("_T")


def summarize(run: RunDirectory, *, remember: bool = False, end: End | None = None) -> Summary:
    """Return the document of ``memlog show --json``. The run's journal is read once, in bounded memory.

    If ``remember`` is True, the summary of an ended run is cached. To read a long run takes seconds.
    ``end`` is the run's end, if the journal has none yet.
    """
    # Checked before reading: if the run ends in between, the journal has its end event when it is read.
    alive = run.is_alive()
    summary = (
        _remembered(run, alive=alive) if remember else _from_journal(run, alive=alive, end=end)
    )
    return _with_states(summary, all_states(run))


def encode(document: msgspec.Struct) -> bytes:
    """Encode a document as indented JSON. Equal documents give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2)


def _remembered(run: RunDirectory, *, alive: bool) -> Summary:
    cache = SummaryCache(run)
    kept = cache.load(alive=alive)
    if kept is not None:
        return kept
    summary = _from_journal(run, alive=alive)
    cache.save(summary)
    return summary


def _from_journal(run: RunDirectory, *, alive: bool, end: End | None = None) -> Summary:
    totals, files = Accumulator(judge=run.end() is None), run.files()
    for file in files:
        for entry in file.read(complete=not alive):
            totals.take(file.process, entry)
    with totals.facts.ended(end):
        return journal_summary(run, totals, files, alive=alive)


def summary_of(
    run: RunDirectory,
    totals: Accumulator,
    files: Iterable[JournalFile],
    *,
    alive: bool,
    end: End | None = None,
) -> Summary:
    """Return the summary of a run from ``totals``, the aggregates of all events in ``files``.

    ``alive``: True if the training process was alive before the files were read. ``end`` is the run's end, if
    the journal has none yet.
    """
    with totals.facts.ended(end):
        return _with_states(journal_summary(run, totals, files, alive=alive), all_states(run))


def journal_summary(
    run: RunDirectory, totals: Accumulator, files: Iterable[JournalFile], *, alive: bool
) -> Summary:
    """Return a run's summary without the saved states of the delivery. The arguments: see `summary_of`."""
    dropped, thinned, missing = totals.dropped.copy(), 0, 0
    for file in files:
        dropped.update({f"journal_{reason}": n for reason, n in file.skipped.items()})
        thinned += file.thinned
        if file.thinned_undelivered:
            dropped["journal_thinned"] += file.thinned_undelivered
        missing += totals.lost(file.process, sum(file.skipped.values()) + file.thinned)
    facts = totals.facts
    status, peaks = facts.status(alive=alive), facts.peaks.summary()
    judged, failed = verdict(facts, status), facts.rank_failure
    return Summary(
        run=_run(run, totals),
        status=status,
        steps=facts.steps,
        metrics=totals.metrics.summary(),
        peaks=peaks,
        verdict=judged.text,
        findings=[finding_facts(event) for event in facts.findings(status)],
        # The helper process's alerts are read after all of the trainer's.
        alerts=[alert_facts(event) for event in sorted(totals.alerts, key=attrgetter("time_us"))],
        artifacts=[_artifact(event) for event in totals.artifacts],
        traced=_traced(totals),
        largest_step=_largest_step(totals.largest_step),
        longest_batch=facts.longest_batch,
        scopes=totals.labels.scopes(),
        points=totals.labels.points(),
        health=_health(totals, dropped, thinned, missing),
        omitted=_omitted(totals),
        phases=totals.phases.facts(peaks),
        first_step=facts.first_step,
        last_step=facts.last_step,
        outcome=judged.outcome,
        host_limit_bytes=facts.host_limit,
        cgroup_limit_bytes=facts.cgroup_limit,
        failed_rank=None
        if failed is None
        else FailedRank(rank=failed.rank, run=failed.run, others=failed.text),
        survived_failures=totals.survived.total(),
        survived_batch_sizes=list(dict.fromkeys(totals.survived_batches)),
        survived_first_step=min(totals.survived, default=None),
        survived_last_step=max(totals.survived, default=None),
        saving=[] if facts.to_save is None else list(saving_costs(facts.to_save)),
        saving_is_partial=facts.to_save is not None and not facts.to_save.whole_model,
        failed_at=None if facts.failure is None else failure_place(facts.failure),
    )


def _with_states(summary: Summary, states: Iterable[UploadState | InProcessState]) -> Summary:
    """Add the saved states of the delivery to a summary.

    A backend can have two states: one of its uploader and one of its in-process writer.
    """
    delivered, dropped = dict(summary.health.delivered), Counter(summary.health.dropped)
    seen: set[str] = set()
    for state in states:
        backend = state.backend
        so_far = delivered.get(backend, _NOTHING_YET)
        delivered[backend] = _delivery(so_far, state, alone=backend not in seen)
        seen.add(backend)
        dropped.update({f"{backend}: {reason}": n for reason, n in state.dropped.items()})
    health = replace(summary.health, delivered=_sorted(delivered), dropped=_sorted(dropped))
    return replace(summary, health=health)


def _delivery(before: Delivery, state: UploadState | InProcessState, *, alone: bool) -> Delivery:
    """Return the delivery ``before`` with one saved state added.

    ``alone``: True if this state is the backend's first one.
    """
    known = {run.id for run in before.runs}
    joined = [
        TrackedRun(id=run_id, uri=None, own=False) for run_id in state.joined if run_id not in known
    ]
    own = state.own_run
    opened = [] if own is None else [_tracked(own, own=True)]
    # A second state that is done must not hide that the first one is not.
    finished = state.stage == "done" and not alone
    return Delivery(
        points=before.points + state.delivered + state.provisional,
        stage=before.stage if finished else state.stage,
        problem=before.problem if finished else _redacted(state.problem),
        runs=[*before.runs, *joined, *opened],
    )


def _run(run: RunDirectory, totals: Accumulator) -> RunFacts:
    header = run.trainer()
    begun_us = header.begun_us if header else None
    ended_us = totals.facts.end.time_us if totals.facts.end else None
    until_us = totals.last_us if ended_us is None else ended_us
    begin = totals.begin
    return RunFacts(
        id=run.id,
        name=begin.name if begin else None,
        project=begin.project if begin else None,
        directory=str(run.path),
        begun=iso_time(begun_us),
        ended=iso_time(ended_us),
        newest_event=iso_time(totals.newest_us),
        duration_s=None if begun_us is None or until_us is None else (until_us - begun_us) / 1e6,
        host=header.process.host if header else None,
        pid=header.process.pid if header else None,
        backends=list(begin.backends) if begin else [],
        devices={
            name: DeviceFacts(
                product=event.product, capacity_bytes=event.capacity, shares_host=event.shares_host
            )
            for name, event in sorted(totals.facts.devices.items())
        },
        parameters=_sorted(totals.parameters),
    )


def alert_facts(event: Alert) -> AlertFacts:
    return AlertFacts(
        time=iso_time(event.time_us),
        step=event.step,
        level=event.level,
        rule=event.rule,
        title=event.title,
        text=event.text,
        value=event.value,
        evaluation=event.evaluation,
        epoch=event.epoch,
    )


def finding_facts(event: Finding) -> FindingFacts:
    forecast = None
    if event.forecast is not None:
        earliest, latest = event.forecast
        forecast = Forecast(earliest_step=earliest, latest_step=latest, limit_bytes=event.limit)
    return FindingFacts(
        kind=event.kind,
        title=event.title,
        where=event.where,
        since_step=event.since_step,
        rate=event.rate,
        forecast=forecast,
        evidence=list(event.evidence),
        confidence=event.confidence,
        remedy=event.remedy,
        step=event.step,
        rank=event.rank,
    )


def _artifact(event: Artifact) -> ArtifactFacts:
    return ArtifactFacts(
        time=iso_time(event.time_us),
        name=event.name,
        kind=event.kind,
        path=event.path,
        size_bytes=event.size,
    )


def _traced(totals: Accumulator) -> TracedFacts:
    fold = totals.facts.traces
    newest = [event for event, _ in totals.health.values()]
    worst, health = fold.worst, newest if fold.steps else []
    reasons = () if fold.steps else (event.untraced for event in newest if event.untraced)
    return TracedFacts(
        steps=fold.steps,
        worst_step=worst.step if worst else None,
        worst_peak_bytes=worst.peak if worst else None,
        worst_exact=worst.exact if worst else None,
        worst_cut=CUT if worst and worst.cut else None,
        worst_device=worst.device if worst else None,
        cost_ms=sum(event.tracing_ms for event in health) if health else None,
        set_up_ms=sum(event.tracing_set_up_ms for event in health) if health else None,
        untraced=next(iter(reasons), None),
    )


def _largest_step(event: StepInputs | None) -> LargestStep | None:
    if event is None:
        return None
    return LargestStep(
        step=event.step,
        device=event.device,
        peak_bytes=event.peak,
        inputs=[
            InputFacts(name=tensor.name, shape=list(tensor.shape), dtype=tensor.dtype)
            for tensor in event.inputs
        ],
        like_step=event.like_step,
    )


def _health(totals: Accumulator, dropped: Counter[str], thinned: int, missing: int) -> HealthFacts:
    newest = [event for event, _ in totals.health.values()]
    faults = Counter[str]()
    unjudged: dict[str, str] = {}
    for event in newest:
        dropped.update(event.dropped)
        faults.update(event.faults)
        unjudged.update(event.unjudged)
    # What a writer counted is missing in its journal, too, and must not be counted twice.
    missing -= sum(dropped[reason] for reason in _COUNTED_BY_THE_WRITER)
    if missing > 0:
        dropped["journal_lost"] += missing
    per_step, total = _overhead(totals)
    return HealthFacts(
        published=totals.published + thinned,
        thinned=thinned,
        delivered=_expected(totals),
        dropped=_sorted(dropped),
        faults=_sorted(faults),
        unjudged=_sorted(unjudged),
        overhead_ms_per_step=per_step,
        overhead_ms_total=total,
        journal_queued=any(event.queued for event in newest) if newest else None,
    )


def _overhead(totals: Accumulator) -> tuple[float | None, float | None]:
    """Return the milliseconds that memlog took from the trainer's thread: per step, and in total."""
    if not totals.health:
        return None, None
    total = sum(event.overhead_total_ms for event, _ in totals.health.values())
    # The numbers of steps are not added up. If the trainer's last health event could not be written, the
    # helper process's event has the missing milliseconds, and counts the same steps again.
    steps = max(steps for _, steps in totals.health.values())
    if not total:
        return None, None  # the trainer has published no health event, or no step was timed
    return (total / steps if steps > 0 else None), total


def _expected(totals: Accumulator) -> dict[str, Delivery]:
    """Return an initial delivery for each tracker that was passed to `init` or has a run of the user."""
    named = set(totals.begin.backends if totals.begin else ()) - {LOCAL}
    expected = {}
    for backend in sorted(named | totals.bindings.keys()):
        bound = totals.bindings.get(backend, {})
        runs = [_tracked(run, own=False) for run in bound.values()]
        expected[backend] = replace(_NOTHING_YET, runs=runs)
    return expected


def _tracked(run: Binding, *, own: bool) -> TrackedRun:
    return TrackedRun(
        id=run.run_id,
        uri=None if run.uri is None else bare_address(run.uri),
        own=own,
        name=_redacted(run.name),
        offset=run.offset,
    )


def _omitted(totals: Accumulator) -> dict[str, int]:
    omitted = {
        **totals.omitted,
        "scopes": totals.labels.omitted_scopes,
        "points": totals.labels.omitted_points,
        "phases": totals.phases.omitted,
    }
    return _sorted({name: count for name, count in omitted.items() if count})


def _sorted(table: Mapping[str, _T]) -> dict[str, _T]:
    return dict(sorted(table.items()))


def _redacted(text: str | None) -> str | None:
    return None if text is None else without_credentials(text)


def iso_time(time_us: int | None) -> str | None:
    """Format a Unix time in microseconds as ISO 8601 in UTC; ``None`` if unknown or out of range."""
    if time_us is None:
        return None
    with suppress(OverflowError):
        moment = _EPOCH + timedelta(microseconds=time_us)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return None


_FILE = "summary.json"
_MAX_BYTES = 64 * 1024**2


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    """Version of memlog that made the summary."""
    sizes: dict[str, int]
    """Bytes of the journal of each process, by its name. Any change of the journal changes a size."""
    summary: Summary


class SummaryCache:
    """Cached summary of one run, valid for the journal as it was when this object was created."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._sizes = {file.process: file.size for file in run.files()}

    def load(self, *, alive: bool) -> Summary | None:
        """Return the cached summary; ``None`` if there is none, or if the cached one is outdated."""
        try:
            kept = msgspec.json.decode(read_plain(self._run.path, _FILE, _MAX_BYTES), type=_Kept)
        except (OSError, *UNDECODABLE):
            return None
        if kept.version != __version__ or kept.sizes != self._sizes:
            return None
        # A run on another machine counts as killed if it writes nothing for a while. It can still be alive.
        if alive and kept.summary.status == "killed":
            return None
        # The folder may have been moved, and a path may be given in another form.
        where = replace(kept.summary.run, id=self._run.id, directory=str(self._run.path))
        return replace(kept.summary, run=where)

    def save(self, summary: Summary) -> None:
        """Save the summary, unless the run goes on or the folder can't be written."""
        if summary.status == "running":
            return
        kept = _Kept(version=__version__, sizes=self._sizes, summary=summary)
        with suppress(OSError), replacing(self._run.path, _FILE) as file:
            file.write(msgspec.json.encode(kept))
