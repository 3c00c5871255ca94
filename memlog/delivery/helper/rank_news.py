"""What the run of the lowest rank tells about all ranks: findings, alerts, ends, and which failed first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.safe_files import read_plain
from memlog.events import (
    POSTMORTEM_FILE,
    POSTMORTEM_KIND,
    Alert,
    Artifact,
    Batch,
    End,
    Event,
    Exit,
    Finding,
    Inquiry,
    OutOfMemory,
    RankDoubt,
    RankFailure,
    now_us,
    readings,
)
from memlog.facts.levels import LevelFold, unsteady
from memlog.facts.oom_cause import OF_ENDS, title_with_cause
from memlog.facts.run_fold import RunFold, facts_of
from memlog.facts.run_verdict import RunVerdict, new_alert
from memlog.facts.verdict import of_memory
from memlog.findings import after_step, of_rank, same_on_ranks
from memlog.journal import Header, RunDirectory
from memlog.journal.artifacts import artifact_path, keep, keep_text
from memlog.journal.format import Role
from memlog.journal.runs import Follower
from memlog.ranks.ends import Failure, RankEnd, bad_end, failure_of
from memlog.ranks.registration import Registration, registration_of
from memlog.ranks.spreads import Stall, Stalls

ROLE: Role = "ranks"
"""Role of the journal that rank 0's helper writes about all ranks."""
_WRITTEN_WITHIN = 2.0
"""Seconds to wait for the event that tells a rank's end, after the rank's process is gone. If no event comes,
the rank counts as lost (`RankReader.is_lost`)."""


class RankReader:
    """Reader of one rank's journal. ``is_judged``: True if `levels` is wanted, which costs time.

    Attributes:
        step: Last completed step of the rank; ``None``: no step is completed.
        failure: Failed allocation after this step; ``None``: none.
        levels: Memory in use after the rank's steps.
        has_ended: True if the rank's journal tells its end.
        has_report: True if the rank's journal has a report on the rank's bad end.
        has_finding: True if the cause of the rank's growth is known.
    """

    def __init__(self, run: RunDirectory, *, is_judged: bool = False) -> None:
        self.run = run
        self._is_judged = is_judged
        self.step: int | None = None
        self.failure: OutOfMemory | None = None
        self.levels = LevelFold()
        self.has_report = self.has_finding = False
        self._follower = Follower(run, lambda _: run.id)
        self.has_ended = False
        self._gone_since: float | None = None

    def look_again(self) -> None:
        """Search for new files at the next reading."""
        self._follower.look_again()

    def news(self) -> Iterator[tuple[Header, Event]]:
        """Yield the events since the last call, except those that rank 0's helper wrote about all ranks."""
        for _, header, event in self._follower.news():
            if header.role == ROLE:
                continue
            self._note(event)
            yield header, event

    def _note(self, event: Event) -> None:
        if isinstance(event, Batch):
            self.step, self.failure = event.step, None
            if self._is_judged:
                self.levels.take(event.step, list(readings(event)))
        elif isinstance(event, Inquiry):
            self.levels.take_search(goes_on=event.searching)
        elif isinstance(event, Finding):
            self.has_finding |= bool(event.rate)
        elif isinstance(event, OutOfMemory):
            self.failure = None if event.caught else event
        elif isinstance(event, Artifact):
            self.has_report |= event.kind == POSTMORTEM_KIND
        elif isinstance(event, (End, Exit)):
            self.has_ended = True

    @property
    def is_over(self) -> bool:
        """True if the journal tells the rank's end, or the process has been gone for `_WRITTEN_WITHIN` s."""
        if self.has_ended:
            return True
        if self.run.is_alive():
            self._gone_since = None
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since >= _WRITTEN_WITHIN

    @property
    def is_lost(self) -> bool:
        """True if the rank has ended, and its journal does not say how it ended."""
        return self.is_over and not self.has_ended

    @property
    def state(self) -> str | None:
        """The kernel's letter for the state of the process; ``None``: unknown, or on another machine."""
        header = self.run.trainer()
        if header is None or header.process.host != os.uname().nodename or not self.run.is_alive():
            return None
        try:
            stat = Path("/proc", str(header.process.pid), "stat").read_text(errors="replace")
        except OSError:
            return None
        return stat.rpartition(")")[2].split()[0]


RANK_ENDED = "ranks: ended"
RANK_STALLS = "ranks: stalls"
RESTARTED = "ranks: restarted"
"""Value of `Alert.rule` if the alert is about a restart. If a rank ended or stalls, the value is `RANK_ENDED`
or `RANK_STALLS`."""
_SETTLED = 5.0
"""Seconds to wait after the first bad end of a rank, so that helpers can write how the other ranks ended."""
_HELD = 10.0
"""Seconds that the alert about another rank's finding waits. If the same was found in this rank by then,
there is no alert about the other rank."""
_MOST_FINDINGS = 200
"""Maximum number of the other ranks' findings that are copied."""


class TrainingNews:
    """The findings and alerts of the other ranks, and alerts about ranks that stall or were restarted.

    ``own`` is the `Registration` of the lowest rank. ``readers`` maps each rank to the reader of the rank's
    journal. If the caller finds another rank, it adds that rank's reader to ``readers``.
    """

    def __init__(self, own: Registration, readers: Mapping[int, RankReader]) -> None:
        self._own = own
        self._readers = readers
        self._stalls = Stalls()
        self._ends: dict[int, RankEnd] = {}
        self._over: set[int] = set()
        self._first_seen: float | None = None
        self._began = False
        self._ready: list[Alert | Finding] = []
        self._copied = 0
        self._held: list[tuple[float, Finding]] = []
        self._known: set[tuple[str, str | None]] = set()

    def take(self, rank: int, event: Event) -> None:
        is_own = rank == self._own.position.rank
        if isinstance(event, Batch):
            self._stalls.step(rank, event.step, time.monotonic())
            if not self._began and is_own:
                self._began = True
                self._note_restart(event)
        elif isinstance(event, (End, Exit)):
            self._note_end(rank, event)
        elif isinstance(event, Finding):
            self._note_finding(rank, event, is_own=is_own)
        elif (
            isinstance(event, Alert)
            and not is_own
            and event.rule not in OF_ENDS  # one new alert covers the bad ends of all ranks
            and not event.is_of_finding  # `_note_finding` makes an alert for the first of several ranks
        ):
            self._ready.append(replace(event, title=of_rank(rank, event.title)))

    def news(self, *, final: bool = False) -> Iterator[Alert | Finding]:
        """Yield the new findings and alerts since the last call.

        With ``final``, no rank will write any more.
        """
        ready, self._ready = self._ready, []
        yield from ready
        yield from self._alerts_about_findings(final=final)
        for stall in self._stalls.look(time.monotonic(), lambda rank: self._readers[rank].state):
            yield _about(stall)

    @property
    def has_settled(self) -> bool:
        """True if a rank has ended badly, and the other ranks had time to end, too."""
        return self._first_seen is not None and time.monotonic() - self._first_seen >= _SETTLED

    @property
    def failure(self) -> Failure | None:
        """Bad end of the training; ``None`` if the training goes on or has ended well."""
        ends = list(self._ends.values())
        if ends:
            # A rank that ran out of memory may be busy with its end.
            ends += [
                end
                for rank, reader in self._readers.items()
                if rank not in self._over and reader.failure is not None
                if (end := self._end_of(rank, End(reader.failure.time_us, "failed"))) is not None
            ]
        return failure_of(ends, self._own.position.world_size, len(self._readers))

    def lost(self, rank: int) -> None:
        """Record that a rank has ended. Call it if no helper process has written how the rank ended."""
        if rank not in self._over:
            written_us = int(self._readers[rank].run.last_write() * 1e6)
            self._note_end(rank, Exit(written_us, None, None), lost=True)

    def _note_end(self, rank: int, event: End | Exit, *, lost: bool = False) -> None:
        self._stalls.end(rank)
        if rank in self._over:
            return
        self._over.add(rank)
        end = self._end_of(rank, event, lost=lost)
        if end is not None:
            self._ends[rank] = end
            self._first_seen = self._first_seen or time.monotonic()

    def _end_of(self, rank: int, event: End | Exit, *, lost: bool = False) -> RankEnd | None:
        reader = self._readers[rank]
        registration = registration_of(reader.run)
        host = None if registration is None else registration.host
        return bad_end(rank, event, reader.step, reader.failure, host, lost=lost)

    def _note_finding(self, rank: int, finding: Finding, *, is_own: bool) -> None:
        if is_own:
            self._known.add(same_on_ranks(finding))
        elif self._copied < _MOST_FINDINGS:
            self._copied += 1
            copy = replace(finding, title=of_rank(rank, finding.title), rank=rank)
            self._ready.append(copy)
            self._held.append((time.monotonic() + _HELD, copy))

    def _alerts_about_findings(self, *, final: bool) -> Iterator[Alert]:
        now = time.monotonic()
        due = [copy for at, copy in self._held if final or at <= now]
        self._held = [] if final else [held for held in self._held if held[0] > now]
        for copy in due:
            if same_on_ranks(copy) not in self._known:
                self._known.add(same_on_ranks(copy))
                yield new_alert(copy)

    def _note_restart(self, event: Batch) -> None:
        restart, before = self._own.position.restart, self._own.before
        if not restart and before is None:
            return
        title, why = "the launcher restarted the training", "it has started all ranks again"
        if restart:
            title = f"{title} (restart {restart})"
        else:  # this machine's launcher did not count the restart
            why += ", because a rank of another machine failed, or a machine joined or left"
        text = f"{why}; this is the first step after that"
        self._ready.append(Alert(event.time_us, event.step, "warning", RESTARTED, title, text))


def _about(stall: Stall) -> Alert:
    if stall.why is None:
        title = f"Rank {stall.rank} goes on"
        return Alert(now_us(), stall.step, "info", RANK_STALLS, title, "it stalled before")
    return Alert(
        now_us(),
        stall.step,
        "error",
        RANK_STALLS,
        f"Rank {stall.rank} stalls {after_step(stall.step)}",
        f"no rank has made a step for {stall.seconds:.0f} s, and {stall.why}",
        stall.seconds,
    )


_EXPLAINED_WITHIN = 8.0
"""Maximum seconds to wait for the report on another rank's bad end."""
_LOOK_EVERY = 0.1
_OF_MEMORY = frozenset({"flamegraph", "snapshot"})
"""Kinds of the other rank's files that are copied: they show what held the memory."""
_MOST_TEXT = 1024**2


def about_failure(
    run: RunDirectory, failure: Failure, title: str | None, diagnostics: Diagnostics
) -> Iterator[RankFailure | Alert]:
    """Yield the events about a bad end of which this rank, or no rank, is the cause.

    ``title`` is the title of the report on this run's end; ``None``: there is no report.
    """
    first = failure.first
    named = failure.title if first is None else title
    if named is None and first is not None:
        with diagnostics.contained("reading how this rank failed"):
            named = _title(facts_of(run), first)
    yield from _events(failure, named or failure.title, None, None, has_report=title is not None)


def about_another_rank(
    run: RunDirectory,
    failure: Failure,
    reader: RankReader,
    look: Callable[[], object],
    diagnostics: Diagnostics,
) -> Iterator[RankFailure | Alert | Artifact]:
    """Yield the events about a training in which another rank failed first, and copy that rank's report.

    ``reader`` reads that rank's journal. ``look`` reads what is new in all ranks' journals.
    """
    first = failure.first
    if first is None:
        return
    title, judged, copies = first.sentence, None, []
    with diagnostics.contained("reading how another rank failed"):
        _wait_for_report(reader, look, diagnostics)
        facts = facts_of(reader.run)
        status = facts.status(alive=False)
        title = _title(facts, first) or title
        judged = of_memory(facts, status)
    with diagnostics.contained("copying the report on another rank"):
        copies = list(_copies(run, reader.run, first.rank))
    yield from copies
    has_report = any(copy.kind == POSTMORTEM_KIND for copy in copies)
    yield from _events(failure, title, reader.run, judged, has_report=has_report)


def doubt_about(
    own_rank: int, readers: Mapping[int, RankReader], diagnostics: Diagnostics
) -> RankDoubt | None:
    """Return the doubt about another rank whose memory rose most, and for which no cause was found."""
    rises: list[tuple[float, int]] = []
    for rank, reader in readers.items():
        known = unsteady(reader.levels)
        if rank != own_rank and not reader.has_finding and known is not None and known[1].rise > 0:
            # Negative, so that the largest rise comes first.
            rises.append((-known[1].rise, rank))
    with diagnostics.contained("judging another rank's memory"):
        for _, rank in sorted(rises)[:1]:
            facts = facts_of(readers[rank].run)
            judged = of_memory(facts, facts.status(alive=False))
            if judged.rises:
                return RankDoubt(now_us(), facts.last_step, rank, judged.text)
    return None


def _events(
    failure: Failure,
    title: str,
    other: RunDirectory | None,
    judged: RunVerdict | None,
    *,
    has_report: bool,
) -> Iterator[RankFailure | Alert]:
    first = failure.first or failure.afterwards[0]
    yield RankFailure(
        first.time_us,
        first.step,
        None if failure.first is None else first.rank,
        None if other is None else other.id,
        failure.status,
        title,
        failure.text,
        "" if judged is None else judged.text,
        None if judged is None else judged.outcome,
    )
    grew = (
        judged.text if judged is not None and (judged.rises or judged.outcome == "finding") else ""
    )
    told = [f"{failure.text}.", grew, f"{POSTMORTEM_FILE} explains it" if has_report else ""]
    text = " ".join(filter(None, told))
    yield Alert(first.time_us, first.step, "error", RANK_ENDED, title, text)


def _title(facts: RunFold, first: RankEnd) -> str | None:
    """Return the title of the report on a rank's end; ``None`` if only the end itself is known."""
    if facts.failure_title is not None:
        return facts.failure_title
    if facts.failure is None or not first.out_of_memory:
        return None
    return of_rank(first.rank, title_with_cause(facts.failure, facts.last_step))


def _wait_for_report(
    reader: RankReader, look: Callable[[], object], diagnostics: Diagnostics
) -> None:
    """Wait until the rank's helper process has explained the end. If the rank has no helper, explain it."""
    # Imported here: few trainings fail, and the import would delay the helper's start.
    from memlog.delivery.helper.postmortem import explain_afterwards  # noqa: PLC0415

    header = reader.run.trainer()
    is_here = header is not None and header.process.host == os.uname().nodename
    deadline = time.monotonic() + _EXPLAINED_WITHIN
    while not reader.has_report and time.monotonic() < deadline:
        if is_here and explain_afterwards(reader.run, "helper", diagnostics):
            break
        time.sleep(_LOOK_EVERY)
        look()
    look()


def _copies(run: RunDirectory, other: RunDirectory, rank: int) -> Iterator[Artifact]:
    """Copy another rank's report, and the files that show what held its memory, into this run."""
    newest = {event.name: event for event in other.events() if isinstance(event, Artifact)}
    names: dict[str, str] = {}
    for artifact in newest.values():
        path = artifact_path(other, artifact)
        if artifact.kind in _OF_MEMORY and path is not None:
            names[artifact.name] = f"rank{rank}-{artifact.name}"
            yield keep(run, path, names[artifact.name], artifact.kind)
    report = newest.get(POSTMORTEM_FILE)
    if report is not None:
        text = read_plain(other.path, report.path, _MOST_TEXT).decode("utf-8", "replace")
        for name, copied in names.items():
            text = text.replace(name, copied)
        yield keep_text(run, text, POSTMORTEM_FILE, POSTMORTEM_KIND)
