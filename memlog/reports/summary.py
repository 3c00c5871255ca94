"""Summing up a run, from its journal and from what its uploaders remember."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Literal, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from memlog._internal.redact import bare_address, without_credentials
from memlog.events import Alert, Artifact, Device
from memlog.journal import Binding, RunDirectory
from memlog.reports.accumulator import Digest
from memlog.reports.schema import (
    AlertFacts,
    ArtifactFacts,
    Delivery,
    DeviceFacts,
    HealthFacts,
    RunFacts,
    RunStatus,
    Summary,
    TracedFacts,
    TrackedRun,
)
from memlog.reports.summary_cache import SummaryCache
from memlog.sink import LOCAL

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NOTHING_YET = Delivery(points=0, stage="waiting", problem=None, runs=[])

_T = TypeVar("_T")


class DeliveryState(Protocol):
    """What an uploader remembers, as far as the document tells it."""

    @property
    def backend(self) -> str:
        """The sink's name."""

    @property
    def stage(self) -> Literal["waiting", "delivering", "unreachable", "done"]:
        """Where it stands."""

    @property
    def problem(self) -> str | None:
        """Why it is not delivering, in one line."""

    @property
    def own_run(self) -> Binding | None:
        """The tracker's run that the sink opened itself."""

    @property
    def joined(self) -> Sequence[str]:
        """Ids of the user's runs that points went to."""

    @property
    def delivered(self) -> int:
        """Points handed over."""

    @property
    def provisional(self) -> int:
        """Points handed over that the tracker has not made safe yet."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Points lost, by reason."""


def summarize(
    run: RunDirectory, states: Iterable[DeliveryState] = (), *, remember: bool = False
) -> Summary:
    """Sums up a run.

    Args:
        run: The run; its journal is read once, and nothing of it is kept but aggregates.
        states: What its uploaders remember.
        remember: A run that is over may be read from what an earlier call kept beside its journal, or
            kept there: for listing many runs.

    Returns:
        The document of ``memlog show --json``.
    """
    # Asked first: a run that ends while it is read has then either been alive or says its end.
    alive = run.is_alive()
    summary = _remembered(run, alive=alive) if remember else _from_journal(run, alive=alive)
    return _with_states(summary, states)


def encode(summary: Summary) -> bytes:
    """The document as JSON text: the same bytes for the same run."""
    return msgspec.json.format(msgspec.json.encode(summary, order="sorted"), indent=2)


def _remembered(run: RunDirectory, *, alive: bool) -> Summary:
    cache = SummaryCache(run)
    kept = cache.load(alive=alive)
    if kept is not None:
        return kept
    summary = _from_journal(run, alive=alive)
    if summary.status != "running":
        cache.save(summary)
    return summary


def _from_journal(run: RunDirectory, *, alive: bool) -> Summary:
    digest, thinned = Digest(), 0
    for file in run.files():
        for entry in file.read(complete=not alive):
            digest.take(file.process, entry)
        digest.dropped.update({f"journal_{reason}": n for reason, n in file.skipped.items()})
        thinned += file.thinned
        if file.thinned_undelivered:
            digest.dropped["journal_thinned"] += file.thinned_undelivered
        if lost := digest.lost(file.process, sum(file.skipped.values()) + file.thinned):
            digest.dropped["journal_lost"] += lost
    return Summary(
        run=_run(run, digest),
        status=_status(digest, alive),
        steps=digest.last_step + 1,
        metrics=digest.metrics.summary(),
        peaks=digest.peaks.summary(),
        alerts=[_alert(event) for event in sorted(digest.alerts, key=_moment)],
        artifacts=[_artifact(event) for event in digest.artifacts],
        traced=_traced(digest),
        scopes=digest.labels.scopes(),
        points=digest.labels.points(),
        health=_health(digest, thinned),
        omitted=_omitted(digest),
    )


def _with_states(summary: Summary, states: Iterable[DeliveryState]) -> Summary:
    """Adds what is remembered; of a backend there may be two, which came after one another."""
    delivered, dropped = dict(summary.health.delivered), Counter(summary.health.dropped)
    told: set[str] = set()
    for state in states:
        backend = state.backend
        so_far = delivered.get(backend, _NOTHING_YET)
        delivered[backend] = _delivery(so_far, state, alone=backend not in told)
        told.add(backend)
        dropped.update({f"{backend}: {reason}": n for reason, n in state.dropped.items()})
    health = replace(summary.health, delivered=_sorted(delivered), dropped=_sorted(dropped))
    return replace(summary, health=health)


def _delivery(before: Delivery, state: DeliveryState, *, alone: bool) -> Delivery:
    """What the journal, or another state too, says of a sink, and what this state does."""
    known = {run.id for run in before.runs}
    joined = [
        TrackedRun(id=run_id, uri=None, own=False) for run_id in state.joined if run_id not in known
    ]
    own = state.own_run
    opened = [] if own is None else [TrackedRun(id=own.run_id, uri=_bare(own.uri), own=True)]
    finished = state.stage == "done" and not alone
    return Delivery(
        points=before.points + state.delivered + state.provisional,
        stage=before.stage if finished else state.stage,
        problem=before.problem if finished else _redacted(state.problem),
        runs=[*before.runs, *joined, *opened],
    )


def _status(digest: Digest, alive: bool) -> RunStatus:
    if digest.end is not None:
        return digest.end.status
    return "running" if alive else "killed"


def _run(run: RunDirectory, digest: Digest) -> RunFacts:
    header = run.trainer()
    begun_us = header.begun_us if header else None
    ended_us = digest.end.time_us if digest.end else None
    until_us = digest.newest_us if ended_us is None else ended_us
    begin = digest.begin
    return RunFacts(
        id=run.id,
        name=begin.name if begin else None,
        project=begin.project if begin else None,
        directory=str(run.path),
        begun=_iso(begun_us),
        ended=_iso(ended_us),
        newest_event=_iso(digest.newest_us),
        duration_s=_seconds(begun_us, until_us),
        host=header.process.host if header else None,
        pid=header.process.pid if header else None,
        backends=list(begin.backends) if begin else [],
        devices=_sorted({name: _device(event) for name, event in digest.devices.items()}),
        parameters=_sorted(digest.parameters),
    )


def _device(event: Device) -> DeviceFacts:
    return DeviceFacts(product=event.product, capacity_bytes=event.capacity)


def _alert(event: Alert) -> AlertFacts:
    return AlertFacts(
        time=_iso(event.time_us),
        step=event.step,
        level=event.level,
        rule=event.rule,
        title=event.title,
        text=event.text,
        value=event.value,
        evaluation=event.evaluation,
        epoch=event.epoch,
    )


def _moment(event: Alert) -> int:
    """What the helper process found is read after everything of the trainer's."""
    return event.time_us


def _artifact(event: Artifact) -> ArtifactFacts:
    return ArtifactFacts(
        time=_iso(event.time_us),
        name=event.name,
        kind=event.kind,
        path=event.path,
        size_bytes=event.size,
    )


def _traced(digest: Digest) -> TracedFacts:
    fold = digest.traces
    worst, told = fold.worst, [event for event, _ in digest.health.values() if fold.steps]
    return TracedFacts(
        steps=fold.steps,
        worst_step=worst.step if worst else None,
        worst_peak_bytes=worst.peak if worst else None,
        worst_exact=worst.exact if worst else None,
        cost_ms=sum(event.tracing_ms for event in told) if told else None,
        set_up_ms=sum(event.tracing_set_up_ms for event in told) if told else None,
    )


def _health(digest: Digest, thinned: int) -> HealthFacts:
    newest = [event for event, _ in digest.health.values()]
    dropped, faults = digest.dropped.copy(), Counter[str]()
    unjudged: dict[str, str] = {}
    for event in newest:
        dropped.update(event.dropped)
        faults.update(event.faults)
        unjudged.update(event.unjudged)
    per_step, total = _overhead(digest)
    return HealthFacts(
        published=digest.published + thinned,
        thinned=thinned,
        delivered=_expected(digest),
        dropped=_sorted(dropped),
        faults=_sorted(faults),
        unjudged=_sorted(unjudged),
        overhead_ms_per_step=per_step,
        overhead_ms_total=total,
        journal_queued=any(event.queued for event in newest) if newest else None,
    )


def _overhead(digest: Digest) -> tuple[float | None, float | None]:
    """Milliseconds that memlog took from the trainer's thread: a step, and in all."""
    if not digest.health:
        return None, None
    total = sum(event.overhead_total_ms for event, _ in digest.health.values())
    # What the helper tells is about the same steps, whose last words the trainer found no room for.
    steps = max(steps for _, steps in digest.health.values())
    if steps and not total:
        return None, None  # the trainer has not said
    return (total / steps if steps > 0 else None), total


def _expected(digest: Digest) -> dict[str, Delivery]:
    """The sinks that points are to go to: those named, and those in which a run of the user's is."""
    named = set(digest.begin.backends if digest.begin else ()) - {LOCAL}
    expected = {}
    for backend in sorted(named | digest.bindings.keys()):
        bound = digest.bindings.get(backend, {})
        runs = [
            TrackedRun(id=run.run_id, uri=_bare(run.uri), own=False, name=_redacted(run.name))
            for run in bound.values()
        ]
        expected[backend] = replace(_NOTHING_YET, runs=runs)
    return expected


def _omitted(digest: Digest) -> dict[str, int]:
    omitted = {
        **digest.omitted,
        "metrics": digest.metrics.omitted,
        "peaks": digest.peaks.omitted,
        "scopes": digest.labels.omitted_scopes,
        "points": digest.labels.omitted_points,
    }
    return _sorted({what: count for what, count in omitted.items() if count})


def _sorted(table: Mapping[str, _T]) -> dict[str, _T]:
    return dict(sorted(table.items()))


def _redacted(text: str | None) -> str | None:
    return None if text is None else without_credentials(text)


def _bare(address: str | None) -> str | None:
    return None if address is None else bare_address(address)


def _iso(time_us: int | None) -> str | None:
    """ISO 8601 in UTC, to the millisecond; ``None`` also for what is no time that a calendar has."""
    if time_us is None:
        return None
    with suppress(OverflowError):
        moment = _EPOCH + timedelta(microseconds=time_us)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return None


def _seconds(begun_us: int | None, until_us: int | None) -> float | None:
    if begun_us is None or until_us is None:
        return None
    with suppress(OverflowError):
        return (until_us - begun_us) / 1e6
    return None
